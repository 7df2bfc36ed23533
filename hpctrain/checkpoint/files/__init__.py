"""File primitives below any format: full reads and writes, O_DIRECT, huge pages, filesystem type, striping."""
