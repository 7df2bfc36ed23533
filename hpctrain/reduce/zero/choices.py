"""The algorithms that a recipe may choose for the reduction of sharded gradients. Does not import torch."""

SHARDED_ALGORITHMS = ("auto", "direct", "hierarchical")
