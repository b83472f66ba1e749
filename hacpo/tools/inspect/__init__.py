"""Looking into one step of a run, from its files: responses side by side, and what other settings would change."""
