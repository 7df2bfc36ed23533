"""Sums of gradients of which each rank keeps a part: for sharded optimizers and sharded gradients (ZeRO)."""
