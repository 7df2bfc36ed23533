"""Batches for one rank: `Loader`, the epoch iterator, prefetching, buffers, adapters for torch."""
