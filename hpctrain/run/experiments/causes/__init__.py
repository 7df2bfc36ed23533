"""From what was observed to causes and words. Pure."""
