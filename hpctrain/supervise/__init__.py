"""Keeps a run alive: starts the ranks, finds out why they ended, and restarts them on the remaining nodes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
