"""Keeping a run alive: starts the ranks, finds why they ended, and starts them again on the nodes that are left."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
