"""Reducers that use a backend's collective operations: flat, by slices, in two levels, top-k and PowerSGD."""
