"""The commands that are no stage: what starts a run, looks at it, mends it, or carries something in or out."""
