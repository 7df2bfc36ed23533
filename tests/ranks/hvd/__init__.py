"""Horovod scripts over hpctrain.hvd, on ranks that mpirun started."""
