"""The all-reduce updater: gradients as views of buckets, loss scale, reduction thread, gradient norm."""
