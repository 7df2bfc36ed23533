"""What the commands do with finished checkpoints: verify, diff, copy, export, import, prune."""
