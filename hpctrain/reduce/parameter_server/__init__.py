"""Bounded staleness: servers hold parts of the parameters, and ranks read and write them one-sided."""
