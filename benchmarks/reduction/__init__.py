"""Gradient reduction, hpctrain and peers alternating in one run. `python -m benchmarks.reduction --help`."""
