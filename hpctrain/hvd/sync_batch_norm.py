"""Batch normalisation over all ranks, under Horovod's name."""

from __future__ import annotations

import torch

from hpctrain.hvd.running import current_session
from hpctrain.train import convert_sync_batch_norm


def SyncBatchNorm(  # noqa: N802
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
) -> torch.nn.Module:
    """Returns a layer that normalises inputs of shape (n, num_features, ...) with mean and variance over all ranks.

    Needs `hvd.init` before. In training forward and backward are collective over all ranks; n may differ and may be 0.
    Runs on the CPU too, where Horovod's does not. Keys of its `state_dict()` are those of `torch.nn.BatchNorm2d`.
    """
    layer = torch.nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats)
    # No other thread uses the world's own communicator.
    return convert_sync_batch_norm(layer, current_session().world)
