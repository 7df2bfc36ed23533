"""A run's metrics by name, and how monitoring systems receive them."""
