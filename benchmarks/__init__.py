"""Measurements against peers. Not part of the package."""
