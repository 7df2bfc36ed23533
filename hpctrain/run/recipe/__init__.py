"""The recipe: its sections as validated objects, read from a TOML file."""
