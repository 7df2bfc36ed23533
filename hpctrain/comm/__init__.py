"""Communication: the communicator interface, helpers built on it, and `open_world`, which opens a backend."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
