"""Traces of chosen steps: clock offsets between nodes, and Chrome's JSON format."""
