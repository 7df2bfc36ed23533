"""The user's function over batches: found by name, run in threads or worker processes."""
