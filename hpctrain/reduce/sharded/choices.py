"""Algorithms that a recipe may choose for the reduction of sharded gradients. Does not load torch."""

SHARDED_ALGORITHMS = ("auto", "direct", "hierarchical")
