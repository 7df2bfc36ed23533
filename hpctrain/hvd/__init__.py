"""Horovod's interface for PyTorch over hpctrain's communicators: `import hpctrain.hvd as hvd` in a Horovod script."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
