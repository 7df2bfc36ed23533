"""`hpctrain bench compare`: whether the figures of a second measurement are lower than those of a first."""
