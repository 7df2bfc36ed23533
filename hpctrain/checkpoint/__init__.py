"""Collective checkpoints: one HDF5 file, written by all ranks together, verified, loaded by any number."""

from hpctrain.checkpoint.engine import Engine
from hpctrain.checkpoint.listing import step_of
from hpctrain.checkpoint.metadata import StoredTensor
from hpctrain.checkpoint.partial import Mismatch, PartialLoad, load_partial, load_weights
from hpctrain.checkpoint.read import Checkpoint, open_checkpoint
from hpctrain.checkpoint.restore import Rejected, Restored, load, load_newest_good
from hpctrain.checkpoint.retention import Best, Retention
from hpctrain.checkpoint.saver import Saved, SaveMode, Saver, WhenBusy, saving_into
from hpctrain.checkpoint.saving import SaveOptions, SaveResult, Saving, save
from hpctrain.checkpoint.snapshot import HostBuffers
from hpctrain.checkpoint.state import FromRank0, Replicated, Shard, State, model_items

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
