"""How the bytes of a rank reach a file: the POSIX engine, the MPI-IO engine, the probe, the choice."""
