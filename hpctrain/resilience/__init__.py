"""When a run stops or saves: signals, and the time that is left."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
