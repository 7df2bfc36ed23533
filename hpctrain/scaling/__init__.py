"""How a run scales with the number of ranks: statistics of measured sweeps, efficiencies, models and simulations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
