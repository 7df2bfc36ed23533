"""Sums of buckets, chunk by chunk: within a node in memory that the node's ranks share, between nodes by messages."""
