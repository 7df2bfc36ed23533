"""The process of a rank, as MPI sees it: how it ends."""
