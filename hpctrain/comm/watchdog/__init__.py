"""A deadline for any communicator's operations: watcher, status board, host probe, timeout report, end of the run."""
