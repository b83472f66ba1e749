"""Recomputing a finished run from its files: every number that training used, and every file it left."""
