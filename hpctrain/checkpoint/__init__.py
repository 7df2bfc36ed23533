"""Collective checkpoints: all ranks write one HDF5 file (or a folder of files); any number of ranks can load it.

Every byte is hashed when it is written, and verified when it is read.
"""

from hpctrain.public_names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    old_names={
        "Shard": "hpctrain.checkpoint.TensorShard",
        "Saving": "hpctrain.checkpoint.CheckpointSave",
        "Saved": "hpctrain.checkpoint.saving.save.SaveResult",
        "TwoTier": ("hpctrain.checkpoint.tiers.two_tier_save.OldTwoTier", "Tiers.begin_save"),
    },
)
