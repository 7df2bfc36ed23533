"""The state of a training: what must be saved so that a resumed run computes the same bits; saving and restoring."""
