"""`hpctrain checkpoint`: the group, and its commands."""
