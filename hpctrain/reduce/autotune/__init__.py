"""Measures the candidate reductions, fits their cost, chooses one by bucket size, and caches the measurements."""
