"""Measures trials and compares the measurements."""
