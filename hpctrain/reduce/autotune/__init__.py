"""Autotuning: measures the candidate reductions, fits their cost, chooses one by bucket size, caches the results."""
