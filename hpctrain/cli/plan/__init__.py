"""`hpctrain plan`."""
