"""Opens, verifies and reads checkpoints: one, the newest undamaged one, or some tensors of one."""
