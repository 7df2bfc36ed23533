"""`hpctrain data`: the group, and its commands."""
