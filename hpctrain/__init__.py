"""hpctrain: distributed PyTorch training on HPC systems.

`init` joins the ranks that mpirun or srun started. `Dataset` and `Loader` read HDF5 shards. `save` writes checkpoints,
and `open_checkpoint` reads them.

The public names are those that this package and its public packages export. The public packages are those that
`__init__.pyi` imports as a whole (`checkpoint`, `data` and so on). Everything else is private. A name is imported when
it is first used, so that `hpctrain --help` does not import torch.
"""

from hpctrain.public_names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    old_names={
        "StopPlan": "hpctrain.TimeToStop",
        "start": "hpctrain.init",
        "Updater": "hpctrain.DistributedOptimizer",
        "FromRank0": "hpctrain.checkpoint.FromRank0",
        "Replicated": "hpctrain.checkpoint.Replicated",
        "SaveOptions": "hpctrain.checkpoint.SaveOptions",
        "Shard": "hpctrain.checkpoint.TensorShard",
        "State": "hpctrain.checkpoint.State",
        "load_newest_good": "hpctrain.checkpoint.load_newest_good",
        "model_items": "hpctrain.checkpoint.model_items",
        "TrainingState": ("hpctrain.train.TrainingState", "session.save_state and session.load_state"),
        "resume": ("hpctrain.train.resume", "session.load_state"),
    },
)
