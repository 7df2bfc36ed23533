"""Batches for one rank: `Loader`, the epoch iterator, prefetching, reuse of memory, adapters for torch."""
