"""Measures, as one process, what a model and a forward and backward of it hold."""
