"""HDF5 files of others as a dataset where they lie: inspect, merge, hash, write a manifest."""
