"""How fast samples are read, against peers and against the machine: `make bench-data`."""
