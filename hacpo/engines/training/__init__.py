"""One update of one agent: torch, on one process or many."""
