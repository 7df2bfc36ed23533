"""HDF5 shards with a manifest, a deterministic order, and batches prepared ahead."""

from hpctrain.data.batch import Batch
from hpctrain.data.batches import Batches
from hpctrain.data.device_copy import batches_on
from hpctrain.data.integrity import (
    BlockChecker,
    CheckMode,
    DamagedData,
    OnDamage,
    check_while_reading,
    make_checker,
)
from hpctrain.data.loader import Loader, Samples
from hpctrain.data.manifest import FieldSpec, Kind, Manifest, ShardEntry, TokenWindows, read_manifest
from hpctrain.data.order import ORDER_NAME, EpochOrder, LastBatch, Order, Span, batch_spans, rank_share
from hpctrain.data.orders import Blocks, Fixed, OrderSpec, Sequential, Shuffled, Stratified, Weighted
from hpctrain.data.pack import Existing, pack_arrays, pack_tokens
from hpctrain.data.read import Dataset, Verify
from hpctrain.data.torch_dataset import (
    TorchIterableDataset,
    TorchMapDataset,
    torch_iterable_dataset,
    torch_map_dataset,
)
from hpctrain.data.transform import TransformContext
from hpctrain.data.verify import Damage, verify
from hpctrain.data.workers import WorkerPool

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
    "OnDamage",
    "Order",
    "OrderSpec",
    "Samples",
    "Sequential",
    "ShardEntry",
    "Shuffled",
    "Span",
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
    "make_checker",
    "pack_arrays",
    "pack_tokens",
    "rank_share",
    "read_manifest",
    "torch_iterable_dataset",
    "torch_map_dataset",
    "verify",
]
