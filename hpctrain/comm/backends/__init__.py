"""Horovod, MPI, threads, serial; opening one of them; probing the libraries."""
