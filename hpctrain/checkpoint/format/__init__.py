"""The checkpoint format: state, boxes, dtypes, link names, hashes, commit header, metadata."""
