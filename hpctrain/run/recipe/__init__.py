"""The recipe: its sections as validated values, read from a TOML file."""
