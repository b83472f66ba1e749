"""What only looks at a run; a reader of the pipeline may pass it by."""
