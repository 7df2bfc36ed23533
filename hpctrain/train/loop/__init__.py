"""The flow of a run: the loop, its saves and evaluations, what it records."""
