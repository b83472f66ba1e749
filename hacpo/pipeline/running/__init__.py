"""`hacpo run`, and what else works on a whole run."""
