"""Records and timings of a run, written per rank. Does not communicate."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
