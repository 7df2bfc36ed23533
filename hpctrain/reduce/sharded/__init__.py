"""Sums of which each rank keeps a part: for sharded optimizers and gradients, and in place of FSDP2's own."""
