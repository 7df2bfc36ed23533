"""Reducers that use a backend's collective operations: flat, sliced, two-level, top-k, PowerSGD, one rank."""
