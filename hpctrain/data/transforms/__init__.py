"""Runs the user's transform of batches, in threads or in worker processes."""
