"""`torch.distributed` on the ranks that mpirun or srun started: a process group over hpctrain's communicators."""

from hpctrain.public_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
