"""Opens, verifies and reads a given checkpoint, or the newest undamaged checkpoint: all tensors or some."""
