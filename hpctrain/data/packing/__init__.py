"""Sources into a dataset directory: which rank makes which shard, resuming, the manifest last."""
