"""Reduction of gradients over the ranks and the optimizer step: updaters, algorithms, wire formats, autotuning."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
