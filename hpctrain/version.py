"""The version of this package: one place, read by setup.py too."""

__version__ = "0.1.0"
