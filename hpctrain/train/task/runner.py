"""`Runner`, the interface between the training loop and what computes a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from hpctrain.data import Batch
from hpctrain.reduce import DistributedOptimizer
from hpctrain.train.task.loss_weights import LossWeights


class Runner(Protocol):
    """A task with its model, or this rank's stages of it.

    device_s: on a GPU, its time for the last `forward_backward`. communicates: forward is collective. counts_samples:
    False on ranks whose samples another rank counts, because both hold parts of one copy of the model.
    weights: of the losses, see `LossWeights`.
    bubbles: when, in the last `forward_backward`, this rank's stages of a pipeline waited for others: begin and end of
    each wait, by `time.perf_counter`; none without a pipeline.
    """

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def device_s(self) -> float: ...
    @property
    def communicates(self) -> bool: ...
    @property
    def bubbles(self) -> Sequence[tuple[float, float]]: ...
    @property
    def counts_samples(self) -> bool: ...
    @property
    def weights(self) -> LossWeights: ...

    def forward_backward(
        self, batch: Batch, updater: DistributedOptimizer, *, micro_batches: int = 1
    ) -> float:
        """Computes the gradients of this rank's share of a batch, in `micro_batches` parts.

        Returns the loss of the share times its weight, or 0 if another rank counts the samples; over all ranks these
        add up to the mean loss of the batch, times the sum of `weights.total` if the task weighs its losses. In the
        first step collective over the world, as the ranks agree whether it does.
        """

    def metrics(self, batch: Batch) -> tuple[Mapping[str, float], float | None] | None:
        """Returns the means of the task's metrics over the batch's samples, at least one, and the weight of these
        means, None for the number of samples; None if another rank does."""
