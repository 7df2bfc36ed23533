"""Whole training steps of the recipes in `examples/`: the default against every backend and algorithm, and Horovod."""
