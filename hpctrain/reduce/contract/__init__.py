"""The seams: `Updater`, `BucketReducer`, the bucket plan and its agreement over ranks, how reductions are polled."""
