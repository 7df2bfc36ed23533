"""Gradient reduction: ours and the peers, in turn, in one run. `python -m benchmarks.reduction --help`."""
