"""The ten stages, one a file: tables and checkpoints in, tables and checkpoints out."""
