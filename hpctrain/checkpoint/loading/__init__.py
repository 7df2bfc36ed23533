"""Open, check and read a checkpoint; restore the newest good one; load a part."""
