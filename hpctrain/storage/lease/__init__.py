"""A directory that one run at a time writes to."""
