"""The state of a training: what must be saved so that it continues to the bit, and how it is restored."""
