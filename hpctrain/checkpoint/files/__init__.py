"""File primitives that do not depend on the checkpoint format: O_DIRECT, huge pages, striping, names, errors."""
