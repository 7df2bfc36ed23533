"""HDF5 shards with a manifest, a deterministic order, and batches prepared ahead."""

from hpctrain.data.format.manifest import FieldSpec, Kind, Manifest, ShardEntry, TokenWindows, read_manifest
from hpctrain.data.indexing.index_files import index_files
from hpctrain.data.integrity.read_checker import (
    BlockChecker,
    CheckMode,
    DamagedData,
    OnDamage,
    check_while_reading,
    make_checker,
)
from hpctrain.data.integrity.verify import Damage, verify
from hpctrain.data.loading.batch import Batch
from hpctrain.data.loading.device_prefetch import batches_on
from hpctrain.data.loading.epoch_iterator import Batches
from hpctrain.data.loading.loader import Loader, Samples
from hpctrain.data.loading.torch_dataset import (
    TorchIterableDataset,
    TorchMapDataset,
    torch_iterable_dataset,
    torch_map_dataset,
)
from hpctrain.data.locality.memory_store import MemoryStore
from hpctrain.data.locality.staged_dataset import StagedDataset
from hpctrain.data.order.epoch_order import (
    ORDER_NAME,
    EpochOrder,
    LastBatch,
    Order,
    Span,
    batch_spans,
    rank_share,
)
from hpctrain.data.order.order_spec import (
    Blocks,
    Fixed,
    OrderSpec,
    Sequential,
    Shuffled,
    Stratified,
    Weighted,
)
from hpctrain.data.packing.pack import Existing, pack_arrays, pack_iterator, pack_tokens
from hpctrain.data.reading.dataset import Dataset, Verify
from hpctrain.data.transforms.transform import TransformContext
from hpctrain.data.transforms.worker_pool import WorkerPool

__all__ = [
    "ORDER_NAME",
    "Batch",
    "Batches",
    "BlockChecker",
    "Blocks",
    "CheckMode",
    "Damage",
    "DamagedData",
    "Dataset",
    "EpochOrder",
    "Existing",
    "FieldSpec",
    "Fixed",
    "Kind",
    "LastBatch",
    "Loader",
    "Manifest",
    "MemoryStore",
    "OnDamage",
    "Order",
    "OrderSpec",
    "Samples",
    "Sequential",
    "ShardEntry",
    "Shuffled",
    "Span",
    "StagedDataset",
    "Stratified",
    "TokenWindows",
    "TorchIterableDataset",
    "TorchMapDataset",
    "TransformContext",
    "Verify",
    "Weighted",
    "WorkerPool",
    "batch_spans",
    "batches_on",
    "check_while_reading",
    "index_files",
    "make_checker",
    "pack_arrays",
    "pack_iterator",
    "pack_tokens",
    "rank_share",
    "read_manifest",
    "torch_iterable_dataset",
    "torch_map_dataset",
    "verify",
]
