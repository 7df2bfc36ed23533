"""How a rank computes: its device, the model's dtype, deterministic algorithms and the start of PyTorch."""
