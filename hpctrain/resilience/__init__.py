"""When a run stops, saves or rolls back: signals, time limits, divergence and lack of memory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
