"""The training loop of a recipe, with its saves, evaluations and records."""
