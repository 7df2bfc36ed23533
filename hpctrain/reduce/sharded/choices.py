"""The names that a recipe may choose for the reduction of sharded gradients. Does not import torch."""

SHARDED_ALGORITHMS = ("auto", "direct", "hierarchical")
SHARDED_WIRES = ("fp32", "fp16", "bf16", "int8")
