from .bucket_reducer import BucketReducerContract as BucketReducerContract
from .codec import CodecContract as CodecContract
from .collective import CollectiveContract as CollectiveContract
from .engine import EngineContract as EngineContract
from .updater import DistributedOptimizerContract as DistributedOptimizerContract
