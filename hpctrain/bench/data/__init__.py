"""`hpctrain bench data`: how fast a dataset is read, compared with plain reads of its bytes."""
