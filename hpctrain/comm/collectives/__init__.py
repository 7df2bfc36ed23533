"""What is built on any communicator: agreement on errors, sums of values, topology, folders that all ranks see."""
