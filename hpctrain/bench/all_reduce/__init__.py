"""`hpctrain bench allreduce`: cells of size, algorithm and wire format, measured on the ranks of a session."""
