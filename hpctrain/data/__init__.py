"""HDF5 shards with a manifest, a deterministic order, and batches prepared ahead."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
