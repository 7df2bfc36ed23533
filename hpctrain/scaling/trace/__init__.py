"""Traces of chosen steps: clock offsets between nodes, and Chrome JSON."""
