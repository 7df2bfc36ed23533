"""Where samples are read from: copies on node storage, the memory of the ranks, or collective MPI-IO."""
