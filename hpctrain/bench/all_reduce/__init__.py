"""`hpctrain bench allreduce`: times all-reduces by size, algorithm and wire format on the ranks of a session."""
