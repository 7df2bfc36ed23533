"""How a run scales with its number of ranks: statistics of measured sweeps, efficiencies and models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
