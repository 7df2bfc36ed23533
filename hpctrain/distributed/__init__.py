"""`torch.distributed` on the ranks that mpirun or srun started: a process group over hpctrain's communicators."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
