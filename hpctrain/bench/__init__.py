"""Measured work: what the parts of a run cost on these ranks, as tables, JSON and plots."""
