"""Plans which rank writes which bytes to which position: write plan, file layout, replica check, HDF5 skeleton."""
