"""`torch.distributed` on the ranks of a session."""
