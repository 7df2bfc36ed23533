"""`hpctrain data`: the command group and its commands."""
