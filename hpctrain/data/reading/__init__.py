"""Reads samples by index into arrays: `Dataset`, open shards, field readers, the decode pool."""
