"""Held-out responses as numbers."""
