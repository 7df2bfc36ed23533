"""`Compression` for plain Horovod scripts. Imports nothing else of `hpctrain.reduce`."""
