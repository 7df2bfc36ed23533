"""`hpctrain top`: the live view of a run in the terminal, read from its run directory alone and drawn with rich."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
