"""Format of a dataset directory on disk: manifest, shard files, token windows, statistics."""
