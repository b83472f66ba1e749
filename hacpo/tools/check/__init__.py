"""What `hacpo plan --check` looks at before a run: settings, models, data, lengths, the machine. No weights are loaded,
and nothing is written in the project."""
