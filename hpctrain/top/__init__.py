"""The live view of a run in the terminal, `hpctrain top`: read from its directory alone, drawn with rich."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
