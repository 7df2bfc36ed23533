"""Autotuning: measures the candidate reductions, fits their cost, chooses one, caches the results."""
