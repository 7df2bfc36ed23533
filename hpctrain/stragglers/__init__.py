"""Finds ranks, nodes and links that are slower than most, and why: by scores from step times, and by a probe."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
