"""Statistics of measurements with few repeats: intervals, permutation tests, fits of scaling laws. Pure functions."""
