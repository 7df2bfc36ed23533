"""Batch normalisation over all ranks, under the name that Horovod uses."""

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
    """Returns a layer that normalises with mean and variance over all ranks. Call `hvd.init` before.

    The input has the shape (n, num_features, ...), where n may differ between ranks and may be 0. In training, forward
    and backward are collective over all ranks. Unlike Horovod's layer it also runs on the CPU. The keys of its
    `state_dict()` are those of `torch.nn.BatchNorm2d`.

    Args:
        num_features: The number of channels.
        eps: The number that is added to the variance.
        momentum: The weight of a new batch in the running statistics; None: the cumulative average.
        affine: Whether the layer has a trained scale and offset per channel.
        track_running_stats: Whether running statistics are kept for evaluation.

    Returns:
        The layer.
    """
    layer = torch.nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats)
    # No other thread uses the world's own communicator.
    return convert_sync_batch_norm(layer, current_session().world)
