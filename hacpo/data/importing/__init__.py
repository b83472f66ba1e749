"""Problems from elsewhere: files are read, their columns turned into the problems table, and the result checked."""
