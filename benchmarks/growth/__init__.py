"""Growth of a run's cost with the number of ranks: operations on shared files, bytes, memory, time; and planning."""
