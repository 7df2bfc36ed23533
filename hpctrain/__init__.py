"""hpctrain: distributed PyTorch training on HPC systems.

`start` joins the ranks that mpirun or srun started; `Dataset` and `Loader` read HDF5 shards; `save` and
`open_checkpoint` are the checkpoints. Names are loaded when they are used: `hpctrain --help` needs no torch.
"""

from importlib import import_module
from typing import Any

from hpctrain.version import __version__

_HOME = {
    "start": "hpctrain.run",
    "Session": "hpctrain.run",
    "Dataset": "hpctrain.data",
    "Loader": "hpctrain.data",
    "State": "hpctrain.checkpoint",
    "Replicated": "hpctrain.checkpoint",
    "FromRank0": "hpctrain.checkpoint",
    "Shard": "hpctrain.checkpoint",
    "model_items": "hpctrain.checkpoint",
    "save": "hpctrain.checkpoint",
    "open_checkpoint": "hpctrain.checkpoint",
    "load_newest_good": "hpctrain.checkpoint",
    "Position": "hpctrain.train",
    "TrainingState": "hpctrain.train",
    "resume": "hpctrain.train",
    "Compression": "hpctrain.reduce.horovod_compression.compressors",
    "HpctrainError": "hpctrain.errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
