"""Measures trials, which are short runs of a training under chosen conditions, and compares the measurements."""
