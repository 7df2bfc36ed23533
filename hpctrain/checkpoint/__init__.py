"""Collective checkpoints: one HDF5 file, written by all ranks together, verified, loaded by any number."""

from hpctrain.checkpoint.engines.engine_choice import choose_engine
from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.files.checkpoint_names import step_of
from hpctrain.checkpoint.files.filesystem_type import filesystem_of
from hpctrain.checkpoint.format.metadata import StoredTensor
from hpctrain.checkpoint.format.state import FromRank0, Replicated, Shard, State, model_items
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, open_checkpoint
from hpctrain.checkpoint.loading.partial_load import Mismatch, PartialLoad, load_partial, load_weights
from hpctrain.checkpoint.loading.restore import Rejected, Restored, load, load_newest_good
from hpctrain.checkpoint.operations.copy import copy_checkpoint
from hpctrain.checkpoint.operations.diff import compare
from hpctrain.checkpoint.operations.export import export_safetensors
from hpctrain.checkpoint.operations.import_tensors import import_tensors
from hpctrain.checkpoint.retention.policy import Best, Retention
from hpctrain.checkpoint.saving.host_snapshot import HostBuffers
from hpctrain.checkpoint.saving.save import SaveOptions, SaveResult, Saving, save
from hpctrain.checkpoint.saving.saver import Saved, SaveMode, Saver, WhenBusy, saving_into
from hpctrain.checkpoint.tiers.recover import recover
from hpctrain.checkpoint.tiers.tiers import Tiers
from hpctrain.checkpoint.tiers.two_tier_save import TwoTier

__all__ = [
    "Best",
    "Checkpoint",
    "Engine",
    "FromRank0",
    "HostBuffers",
    "Mismatch",
    "PartialLoad",
    "Rejected",
    "Replicated",
    "Restored",
    "Retention",
    "SaveMode",
    "SaveOptions",
    "SaveResult",
    "Saved",
    "Saver",
    "Saving",
    "Shard",
    "State",
    "StoredTensor",
    "Tiers",
    "TwoTier",
    "WhenBusy",
    "choose_engine",
    "compare",
    "copy_checkpoint",
    "export_safetensors",
    "filesystem_of",
    "import_tensors",
    "load",
    "load_newest_good",
    "load_partial",
    "load_weights",
    "model_items",
    "open_checkpoint",
    "recover",
    "save",
    "saving_into",
    "step_of",
]
