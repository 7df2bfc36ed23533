"""Gradient sums that are divided over the ranks: for sharded optimizers and gradients, and for FSDP2."""
