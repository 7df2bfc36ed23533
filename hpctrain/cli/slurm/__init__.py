"""`hpctrain slurm`: the group, and its commands."""
