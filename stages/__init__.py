"""The commands: one Typer command a file, files in, files out."""
