"""Runs recipes: the session of ranks, the objects of a run, and its records."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
