"""What a run sends to monitoring systems, in addition to its own records."""
