"""Data locality: staging on node storage, the dataset in memory, collective MPI-IO reads."""
