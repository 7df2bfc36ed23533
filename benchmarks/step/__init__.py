"""Whole training steps of the recipes in `examples/`: the default compared with every backend and algorithm, and with
plain Horovod."""
