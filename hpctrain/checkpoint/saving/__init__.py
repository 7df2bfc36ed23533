"""A save as a transaction in phases, and the `Saver` that runs saves synchronously or in the background."""
