"""A checkpoint as a model folder for everybody: which step, which files, and the model card."""
