"""`hpctrain bench checkpoint`: how fast state is saved and loaded, against plain reads and writes."""
