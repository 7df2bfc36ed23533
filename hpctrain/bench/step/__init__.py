"""`hpctrain bench step`: times training steps by number of ranks."""
