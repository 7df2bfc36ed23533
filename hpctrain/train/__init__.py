"""Training as recipes do it: the task, the loop, the learning rate schedule and the saved state."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
