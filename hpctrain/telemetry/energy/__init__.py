"""Energy counters of a node: which can be read, and their readings at intervals."""
