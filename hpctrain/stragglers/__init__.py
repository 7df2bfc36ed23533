"""Finds ranks, nodes and links that are slower than the others, and why: scores from step times, and a probe."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
