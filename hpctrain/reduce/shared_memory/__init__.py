"""Sums of buckets: within a node in memory that its ranks share, between nodes by messages, chunk by chunk."""
