"""What a checkpoint is, as values: state, boxes, dtypes, link names, hashes, commit header, metadata."""
