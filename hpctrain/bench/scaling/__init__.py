"""`hpctrain bench scaling`: strong or weak scaling over interleaved repeats, with intervals and fitted laws."""
