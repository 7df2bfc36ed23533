"""The headline figures of all suites with few rounds, in ten minutes: `make bench`."""
