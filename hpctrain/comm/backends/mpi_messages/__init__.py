"""How messages of MPI travel: in which pieces, and from rank to rank in a ring."""
