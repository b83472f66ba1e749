"""A run looked at: progress, figures of a step, lessons."""
