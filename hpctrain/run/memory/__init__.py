"""How much memory a rank needs, and what it sends, for each way to split a recipe's model: `hpctrain plan`."""
