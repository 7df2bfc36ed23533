from .collective import CollectiveContract as CollectiveContract
from .engine import EngineContract as EngineContract
from .reductions import (
    BucketReducerContract as BucketReducerContract,
    CodecContract as CodecContract,
    DistributedOptimizerContract as DistributedOptimizerContract,
)
