"""HDF5 shards with a manifest, a deterministic order, and batches prepared ahead."""

from hpctrain.public_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
