"""Decides which checkpoints are kept, deleted or recycled, and how often to save."""
