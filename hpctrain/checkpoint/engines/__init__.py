"""Engines, which write the bytes of a rank to a file: POSIX (`direct`) and MPI-IO (`mpio`), and the choice of one."""
