"""What `hacpo plan --check` looks at before a run: settings, models, data, lengths. Nothing is loaded or written."""
