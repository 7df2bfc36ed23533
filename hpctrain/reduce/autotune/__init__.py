"""Measures the candidate reductions, fits a cost, chooses by size, keeps the measurement."""
