"""Runs the user's transform of batches in threads or worker processes."""
