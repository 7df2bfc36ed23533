"""`Compression` for scripts that stay plain Horovod. Imports nothing else of `hpctrain.reduce`."""
