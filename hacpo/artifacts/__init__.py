"""Files: the tables' columns, where they lie, and how they are read and written whole."""
