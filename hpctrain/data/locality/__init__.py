"""Data nearer to the rank: staging on node storage, the dataset in memory, collective MPI-IO reads."""
