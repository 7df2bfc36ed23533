"""Block hashes: checked while training and offline; damaged samples are skipped."""
