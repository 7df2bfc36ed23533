"""What a run must save to continue to the bit, and how it is restored."""
