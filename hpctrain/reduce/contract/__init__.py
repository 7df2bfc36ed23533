"""The interfaces `DistributedOptimizer` and `BucketReducer`, the bucket plan, its check over ranks, and polling of
reductions."""
