"""The engine: buckets in memory that a node's ranks share, chunks between nodes, compiled sums."""
