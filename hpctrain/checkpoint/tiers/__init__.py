"""Two-tier checkpoints: saved to node storage, copied to a partner node, drained to the shared folder; recovery."""
