"""What a rank computes with: its device, the model's dtype, deterministic algorithms, torch without its compiler."""
