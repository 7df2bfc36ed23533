"""The end of a rank's process, as MPI sees it."""
