"""What HDF5 files look like inside: dataset layouts, chunk index, encoding, decoding. Knows no manifest."""
