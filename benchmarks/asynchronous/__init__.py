"""Fewer synchronisations against synchronous training and its peers: seconds per step, bytes between nodes, loss."""
