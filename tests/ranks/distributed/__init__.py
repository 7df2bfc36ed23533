"""torch.distributed on ranks that mpirun started."""
