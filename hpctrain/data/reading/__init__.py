"""Reads samples by index into arrays: `Dataset`, open shards, readers of fields, the threads that decode."""
