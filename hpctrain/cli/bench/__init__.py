"""`hpctrain bench`: the group, and its commands."""
