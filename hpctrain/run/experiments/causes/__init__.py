"""Derives causes, and the texts about them, from what the experiments observed. Pure."""
