"""Implementation of `hpctrain doctor`: facts gathered on each rank, and findings about all ranks."""
