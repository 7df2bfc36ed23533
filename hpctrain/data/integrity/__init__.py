"""Checks block hashes, while training or offline, and skips damaged samples."""
