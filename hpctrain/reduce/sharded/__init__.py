"""Sums that are divided over the ranks: of sharded optimizers and gradients, and of FSDP2 in place of its own."""
