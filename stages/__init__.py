"""The ten stages, one a file: tables and checkpoints in, tables and checkpoints out."""

ORDER = (
    "resolve",
    "prepare",
    "warmup",
    "generate",
    "verify",
    "pool",
    "advantage",
    "update",
    "evaluate",
    "report",
)
"""In which help lists them, without loading the catalogue, whose order it is."""
