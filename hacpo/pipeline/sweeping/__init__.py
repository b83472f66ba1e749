"""`hacpo sweep`: many runs from one small file, each a run like any other."""
