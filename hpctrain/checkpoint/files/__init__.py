"""Format-independent file primitives: full reads and writes, O_DIRECT, huge pages, filesystem type, striping."""
