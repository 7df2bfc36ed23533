"""Packs sources into a dataset directory: assigns shards to ranks, resumes, and writes the manifest last."""
