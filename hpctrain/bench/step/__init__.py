"""`hpctrain bench step`: training steps by number of ranks."""
