"""`hpctrain bench checkpoint`: how fast state is saved and loaded, compared with plain reads and writes."""
