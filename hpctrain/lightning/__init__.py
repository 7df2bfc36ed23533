"""Strategies for Lightning's Trainer on ranks that mpirun or srun started.

Needs `hpctrain[lightning]`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
