from .dcp.convert import DcpImport as DcpImport, export_dcp as export_dcp, import_dcp as import_dcp
from .engines.engine_choice import choose_engine as choose_engine
from .engines.engine_name import Engine as Engine, engine_named as engine_named
from .files.checkpoint_names import (
    finished_newest_first as finished_newest_first,
    partial_files as partial_files,
    step_of as step_of,
)
from .files.io_errors import explained as explained
from .format.metadata import Metadata as Metadata, StoredTensor as StoredTensor
from .format.state import (
    SEPARATOR as SEPARATOR,
    FromRank0 as FromRank0,
    Item as Item,
    Replicated as Replicated,
    State as State,
    TensorShard as TensorShard,
    element_items as element_items,
    header_of as header_of,
    tensor_items as tensor_items,
)
from .format.tensor_difference import Tolerance as Tolerance
from .format.typed_values import (
    decode as decode,
    encode as encode,
    get_inline as get_inline,
    model_items as model_items,
    model_state as model_state,
    put_inline as put_inline,
    value_from as value_from,
    value_items as value_items,
)
from .loading.check_structure import is_checkpoint as is_checkpoint, read_structure as read_structure
from .loading.checkpoint import (
    Checkpoint as Checkpoint,
    Regions as Regions,
    open_checkpoint as open_checkpoint,
)
from .loading.restore import (
    MODEL_PREFIX as MODEL_PREFIX,
    Mismatch as Mismatch,
    PartialLoad as PartialLoad,
    Rejected as Rejected,
    Restored as Restored,
    load as load,
    load_newest_good as load_newest_good,
    load_partial as load_partial,
    load_weights as load_weights,
)
from .operations.diff import (
    Difference as Difference,
    TensorDifference as TensorDifference,
    compare as compare,
)
from .operations.export import (
    Exported as Exported,
    export_safetensors as export_safetensors,
    export_state_dict as export_state_dict,
)
from .operations.import_tensors import (
    STATE_DICT_SUFFIXES as STATE_DICT_SUFFIXES,
    import_tensors as import_tensors,
)
from .operations.maintenance import (
    Verified as Verified,
    checkpoint_size as checkpoint_size,
    copy_checkpoint as copy_checkpoint,
    prune as prune,
    verify as verify,
)
from .planning.replicas import ReplicaCheck as ReplicaCheck
from .retention.policy import (
    FIRST_AFTER_S as FIRST_AFTER_S,
    Best as Best,
    Costs as Costs,
    IntervalAdvice as IntervalAdvice,
    Retention as Retention,
    daly_interval_s as daly_interval_s,
)
from .saving.background import BackgroundThread as BackgroundThread, HostBuffers as HostBuffers
from .saving.save import CheckpointSave as CheckpointSave, SaveResult as SaveResult, save as save
from .saving.save_options import PageCache as PageCache, SaveOptions as SaveOptions
from .saving.saver import (
    CheckpointRequests as CheckpointRequests,
    SaveMode as SaveMode,
    Saver as Saver,
    WhenBusy as WhenBusy,
    ask_for_save as ask_for_save,
    saving_into as saving_into,
)
from .tiers.kept_state import keep_state as keep_state, rehearse_keeping as rehearse_keeping
from .tiers.node_store import LocalStore as LocalStore
from .tiers.recover import recover as recover
from .tiers.two_tier_save import (
    RUN_ID as RUN_ID,
    RunIdentity as RunIdentity,
    Tiers as Tiers,
    identify_run as identify_run,
    saving_through as saving_through,
)

# Public. The other names are for the other packages of hpctrain.
__all__ = [
    "Best",
    "Checkpoint",
    "CheckpointSave",
    "DcpImport",
    "Difference",
    "Engine",
    "Exported",
    "FromRank0",
    "HostBuffers",
    "Item",
    "Mismatch",
    "PartialLoad",
    "Rejected",
    "Replicated",
    "Restored",
    "Retention",
    "SaveMode",
    "SaveOptions",
    "SaveResult",
    "Saver",
    "State",
    "StoredTensor",
    "TensorDifference",
    "TensorShard",
    "Tiers",
    "Tolerance",
    "Verified",
    "WhenBusy",
    "ask_for_save",
    "choose_engine",
    "compare",
    "copy_checkpoint",
    "export_dcp",
    "export_safetensors",
    "export_state_dict",
    "import_dcp",
    "import_tensors",
    "is_checkpoint",
    "load",
    "load_newest_good",
    "load_partial",
    "load_weights",
    "model_items",
    "model_state",
    "open_checkpoint",
    "prune",
    "recover",
    "save",
    "saving_into",
    "saving_through",
    "verify",
]
