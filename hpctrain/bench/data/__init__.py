"""`hpctrain bench data`: how fast a dataset is read, against plain reads of its bytes."""
