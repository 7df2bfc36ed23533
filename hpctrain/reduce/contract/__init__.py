"""The interfaces `DistributedOptimizer` and `BucketReducer`, and what their implementations share: bucket plans, step
end.
"""
