"""A save as a transaction in phases, and the `Saver`, which runs saves in the foreground or in the background."""
