"""`hpctrain plan`: the memory and traffic of a rank for each way to split a recipe's model."""
