"""Says whether a run would gain by more or fewer nodes, from what the run has measured."""
