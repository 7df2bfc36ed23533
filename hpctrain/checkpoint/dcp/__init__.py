"""Import from and export to checkpoints of torch.distributed.checkpoint (DCP)."""
