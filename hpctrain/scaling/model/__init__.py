"""Closed formulas for the time of a step on any number of nodes, and their calibration."""
