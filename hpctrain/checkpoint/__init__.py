"""Collective checkpoints: one HDF5 file, written by all ranks together, verified, loaded by any number."""

from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.files.checkpoint_names import step_of
from hpctrain.checkpoint.format.metadata import StoredTensor
from hpctrain.checkpoint.format.state import FromRank0, Replicated, Shard, State, model_items
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, open_checkpoint
from hpctrain.checkpoint.loading.partial_load import Mismatch, PartialLoad, load_partial, load_weights
from hpctrain.checkpoint.loading.restore import Rejected, Restored, load, load_newest_good
from hpctrain.checkpoint.retention.policy import Best, Retention
from hpctrain.checkpoint.saving.host_snapshot import HostBuffers
from hpctrain.checkpoint.saving.save import SaveOptions, SaveResult, Saving, save
from hpctrain.checkpoint.saving.saver import Saved, SaveMode, Saver, WhenBusy, saving_into

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
    "WhenBusy",
    "load",
    "load_newest_good",
    "load_partial",
    "load_weights",
    "model_items",
    "open_checkpoint",
    "save",
    "saving_into",
    "step_of",
]
