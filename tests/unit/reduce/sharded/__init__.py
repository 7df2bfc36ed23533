"""Sharded optimizer and gradients."""
