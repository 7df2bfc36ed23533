"""Opens, verifies and reads checkpoints: a given one, the newest undamaged one, or some tensors of one."""
