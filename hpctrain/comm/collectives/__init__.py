"""Helpers for any communicator: agreed errors, sums of values, two-level reduction, folders that all ranks see."""
