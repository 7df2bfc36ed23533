"""Sharded parameters: an updater of a model that FSDP2 shards."""
