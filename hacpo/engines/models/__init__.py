"""Model folders: made, loaded, adapted, saved."""
