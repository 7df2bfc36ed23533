"""Decides which checkpoints are kept or deleted, and how often to save."""
