"""Sharded optimizer state, gradients and parameters: their sums and updates."""
