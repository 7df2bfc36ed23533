"""Speed of reading samples, compared with peers and with raw reading: `make bench-data`."""
