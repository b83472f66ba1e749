"""How a stage is executed: its context, its command, its processes."""
