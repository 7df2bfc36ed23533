"""Buckets in memory shared by a node's ranks, summed there by compiled code, and by chunked messages between nodes."""
