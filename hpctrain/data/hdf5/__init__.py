"""Low-level access to HDF5 files: dataset layouts, chunk index, encoding, decoding. Independent of the manifest."""
