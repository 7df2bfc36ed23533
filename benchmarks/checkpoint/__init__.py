"""Speed of saving and loading checkpoints, compared with peers and with the disk: `make bench-checkpoint`."""
