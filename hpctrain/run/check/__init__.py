"""`hpctrain check`: the experiments on a recipe."""
