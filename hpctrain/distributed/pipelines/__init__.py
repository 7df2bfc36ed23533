"""Pipelines: which layers are which stage, and how PyTorch's schedules compute them."""
