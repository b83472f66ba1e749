"""What DVC records of a run: its files, its cache, and their repair."""
