"""Problems, made or imported."""
