"""Which checkpoints stay, and how those that went come back."""
