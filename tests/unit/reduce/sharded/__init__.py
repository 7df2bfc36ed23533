"""Sums of sharded gradients."""
