"""hpctrain: distributed PyTorch training on HPC systems.

`start` joins the ranks that mpirun or srun started; `Dataset` and `Loader` read HDF5 shards; `save` and
`open_checkpoint` are the checkpoints. Names are loaded when they are used: `hpctrain --help` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpctrain.version import __version__

if TYPE_CHECKING:  # for type checkers and completion; at run time `__getattr__` loads a name from `_HOME`
    from hpctrain.checkpoint import FromRank0 as FromRank0
    from hpctrain.checkpoint import Replicated as Replicated
    from hpctrain.checkpoint import Shard as Shard
    from hpctrain.checkpoint import State as State
    from hpctrain.checkpoint import load_newest_good as load_newest_good
    from hpctrain.checkpoint import model_items as model_items
    from hpctrain.checkpoint import open_checkpoint as open_checkpoint
    from hpctrain.checkpoint import save as save
    from hpctrain.data import Batch as Batch
    from hpctrain.data import Dataset as Dataset
    from hpctrain.data import Loader as Loader
    from hpctrain.data import pack_arrays as pack_arrays
    from hpctrain.errors import HpctrainError as HpctrainError
    from hpctrain.reduce import Compression as Compression
    from hpctrain.reduce import Updater as Updater
    from hpctrain.run import Session as Session
    from hpctrain.run import load_recipe as load_recipe
    from hpctrain.run import start as start
    from hpctrain.train import Position as Position
    from hpctrain.train import Task as Task
    from hpctrain.train import TrainingState as TrainingState
    from hpctrain.train import resume as resume

_HOME = {
    "Batch": "hpctrain.data",
    "Compression": "hpctrain.reduce",
    "Dataset": "hpctrain.data",
    "FromRank0": "hpctrain.checkpoint",
    "HpctrainError": "hpctrain.errors",
    "Loader": "hpctrain.data",
    "Position": "hpctrain.train",
    "Replicated": "hpctrain.checkpoint",
    "Session": "hpctrain.run",
    "Shard": "hpctrain.checkpoint",
    "State": "hpctrain.checkpoint",
    "Task": "hpctrain.train",
    "TrainingState": "hpctrain.train",
    "Updater": "hpctrain.reduce",
    "load_newest_good": "hpctrain.checkpoint",
    "load_recipe": "hpctrain.run",
    "model_items": "hpctrain.checkpoint",
    "open_checkpoint": "hpctrain.checkpoint",
    "pack_arrays": "hpctrain.data",
    "resume": "hpctrain.train",
    "save": "hpctrain.checkpoint",
    "start": "hpctrain.run",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
