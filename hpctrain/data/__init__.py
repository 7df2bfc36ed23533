"""HDF5 shards with a manifest, a deterministic order, and batches prepared ahead."""

from hpctrain.data.batch import Batch
from hpctrain.data.integrity import BlockChecker, CheckMode, DamagedData, OnDamage, make_checker
from hpctrain.data.loader import Batches, Loader, Samples
from hpctrain.data.manifest import FieldSpec, Kind, Manifest, ShardEntry, TokenWindows, read_manifest
from hpctrain.data.order import ORDER_NAME, EpochOrder, LastBatch, Order, Span, batch_spans, rank_share
from hpctrain.data.orders import Blocks, Fixed, OrderSpec, Sequential, Shuffled, Stratified, Weighted
from hpctrain.data.pack import Existing, pack_arrays, pack_tokens
from hpctrain.data.read import Dataset, Verify
from hpctrain.data.verify import Damage, verify

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
    "Verify",
    "Weighted",
    "batch_spans",
    "make_checker",
    "pack_arrays",
    "pack_tokens",
    "rank_share",
    "read_manifest",
    "verify",
]
