"""The engine reducer: buckets in memory shared by a node's ranks, chunked messages between nodes, compiled sums."""
