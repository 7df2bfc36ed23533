"""What is measured of a trial, and comparisons of such measurements."""
