"""Autotuning: measures the candidate reductions, fits their costs, chooses a candidate, caches the results."""
