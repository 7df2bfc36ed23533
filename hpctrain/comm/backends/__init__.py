"""The backends Horovod, MPI, threads and serial; `open_world`; probes of the installed libraries."""
