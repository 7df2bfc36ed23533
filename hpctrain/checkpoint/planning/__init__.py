"""Who writes which bytes where: write plan, its agreement over ranks, file layout, replicas, HDF5 skeleton."""
