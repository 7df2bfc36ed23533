"""Indexes existing HDF5 files as a dataset without copying them: inspect, merge, hash, write a manifest."""
