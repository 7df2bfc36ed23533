"""The implementation of `hpctrain doctor`: gathers facts on each rank, and derives findings about all ranks."""
