"""What `hpctrain launch` promises of starting, stopping and ending ranks, tried with the MPI of an environment."""
