"""Datasets of HDF5 shards with a manifest, read in a deterministic order as batches that threads prepare ahead."""

from hpctrain.public_names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    old_names={
        "verify": "hpctrain.data.verify_dataset",
        "Batches": "hpctrain.data.EpochIterator",
    },
)
