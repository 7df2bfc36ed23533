"""How fast state is saved and loaded, against peers and against the disk: `make bench-checkpoint`."""
