"""hpctrain: distributed PyTorch training on HPC systems.

`start` joins the ranks that mpirun or srun started; `Dataset` and `Loader` read HDF5 shards; `save` and
`open_checkpoint` are the checkpoints. Public are the names of `hpctrain` and of its packages (`hpctrain.data` and so
on), as their `__init__.pyi` list them; everything below a package is private. Names are loaded when they are used:
`hpctrain --help` needs no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
