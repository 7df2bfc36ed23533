"""Updaters for models of which each rank holds a whole copy: gradients in buckets, loss scale, reduction thread."""
