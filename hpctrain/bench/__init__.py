"""Benchmarks of the parts of a run on these ranks, with results as tables, JSON and plots."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
