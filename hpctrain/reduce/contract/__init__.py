"""The interfaces `DistributedOptimizer` and `BucketReducer`, the plan of buckets, and the end of a step."""
