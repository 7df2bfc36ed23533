from .format.manifest import (
    FieldSpec as FieldSpec,
    Kind as Kind,
    Manifest as Manifest,
    ShardEntry as ShardEntry,
    StoredField as StoredField,
    TokenWindows as TokenWindows,
    read_manifest as read_manifest,
)
from .hdf5.filters import ChunkCodec as ChunkCodec, codec_names as codec_names
from .indexing.decoding_choice import (
    ValuesWarning as ValuesWarning,
    decoding_in_words as decoding_in_words,
    meanings_in_words as meanings_in_words,
)
from .indexing.index_files import (
    IndexPaths as IndexPaths,
    IndexReading as IndexReading,
    OldIndex as OldIndex,
    TokenRequest as TokenRequest,
    index_files as index_files,
)
from .indexing.request import (
    Decode as Decode,
    SampleIs as SampleIs,
    parse_decode as parse_decode,
    parse_field_paths as parse_field_paths,
    parse_missing as parse_missing,
)
from .integrity.hashed_blocks import (
    Damage as Damage,
    find_datasets as find_datasets,
    merge_damage as merge_damage,
    verify_dataset as verify_dataset,
)
from .integrity.read_checker import (
    BlockChecker as BlockChecker,
    CheckMode as CheckMode,
    DamagedData as DamagedData,
    OnDamage as OnDamage,
    check_while_reading as check_while_reading,
    make_checker as make_checker,
)
from .loading.batch import Batch as Batch, batches_on as batches_on
from .loading.loader import PREFETCH_BYTES as PREFETCH_BYTES, Loader as Loader, Samples as Samples
from .loading.prefetch import EpochIterator as EpochIterator
from .loading.shared_order import SharedOrder as SharedOrder
from .loading.torch_dataset import (
    TorchIterableDataset as TorchIterableDataset,
    TorchMapDataset as TorchMapDataset,
    torch_iterable_dataset as torch_iterable_dataset,
    torch_map_dataset as torch_map_dataset,
)
from .locality.collective_dataset import CollectiveDataset as CollectiveDataset
from .locality.memory_store import MemoryStore as MemoryStore
from .locality.staged_dataset import StagedDataset as StagedDataset
from .order.epoch_order import (
    ORDER_NAME as ORDER_NAME,
    EpochOrder as EpochOrder,
    LastBatch as LastBatch,
    Order as Order,
    PositionRange as PositionRange,
    add_sample_sums as add_sample_sums,
    rank_share as rank_share,
    sample_sum as sample_sum,
    show_sample_sum as show_sample_sum,
)
from .order.order_spec import (
    Blocks as Blocks,
    Fixed as Fixed,
    OrderSpec as OrderSpec,
    Sequential as Sequential,
    Shuffled as Shuffled,
    Stratified as Stratified,
    Weighted as Weighted,
    block_samples_for as block_samples_for,
)
from .packing.directory import Existing as Existing
from .packing.pack import (
    pack_arrays as pack_arrays,
    pack_iterator as pack_iterator,
    pack_source as pack_source,
    pack_tokens as pack_tokens,
)
from .reading.dataset import (
    Dataset as Dataset,
    Verify as Verify,
    open_together as open_together,
    read_column as read_column,
)
from .sources.numpy_files import Colour as Colour, parse_image_size as parse_image_size
from .sources.registry import SourceOptions as SourceOptions
from .sources.tables import parse_table_fields as parse_table_fields
from .transforms.transform import TransformContext as TransformContext
from .transforms.worker_pool import WorkerPool as WorkerPool

# Public. The other names are for the other packages of hpctrain.
__all__ = [
    "Batch",
    "Blocks",
    "CheckMode",
    "ChunkCodec",
    "CollectiveDataset",
    "Colour",
    "Damage",
    "DamagedData",
    "Dataset",
    "Decode",
    "EpochIterator",
    "EpochOrder",
    "Existing",
    "FieldSpec",
    "Fixed",
    "IndexPaths",
    "IndexReading",
    "LastBatch",
    "Loader",
    "Manifest",
    "MemoryStore",
    "OldIndex",
    "OnDamage",
    "OrderSpec",
    "SampleIs",
    "Samples",
    "Sequential",
    "Shuffled",
    "SourceOptions",
    "StagedDataset",
    "Stratified",
    "TokenRequest",
    "TokenWindows",
    "TorchIterableDataset",
    "TorchMapDataset",
    "TransformContext",
    "ValuesWarning",
    "Verify",
    "Weighted",
    "batches_on",
    "check_while_reading",
    "find_datasets",
    "index_files",
    "open_together",
    "pack_arrays",
    "pack_iterator",
    "pack_source",
    "pack_tokens",
    "read_manifest",
    "torch_iterable_dataset",
    "torch_map_dataset",
    "verify_dataset",
]
