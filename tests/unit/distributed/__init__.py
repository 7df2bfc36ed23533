"""Splitting of models: what needs no ranks."""
