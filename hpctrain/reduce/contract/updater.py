"""`Updater`, the interface between the training loop and the code that updates parameters from all ranks' gradients.

It is more general than an all-reduce: a sharded optimizer (reduce-scatter, update of the own part, all-gather), a
parameter server and delayed updates can implement the same Protocol without changes to the training loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hpctrain.reduce.contract.bucket_reducer import StateTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Result of one `step`. All fields except the times are the same on all ranks."""

    applied: bool  # False: gradients were not finite, parameters are unchanged
    grad_norm: float  # global 2-norm before clipping; nan when not applied
    loss_scale: float  # the factor that was used in this step
    sums: dict[str, float] = field(default_factory=dict)  # the caller's `sums`, summed over the ranks
    sync_s: float = 0.0  # seconds with a reduction in flight
    exposed_sync_s: float = 0.0  # seconds of these in which training waited


class Updater(Protocol):
    """Turns the ranks' gradients into the same updated parameters on every rank."""

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """Runs backward on `weight * loss`. Not collective itself; reductions start as gradients become ready.

        loss: one element.

        weight: this micro-batch's share of the global batch (samples / global samples), so that the sum over
            ranks and micro-batches is the mean over the global batch, also with unequal counts.
        last: False for all but the last micro-batch of a step; nothing is reduced after these.
        """

    def step(self, *, sums: Mapping[str, float] | None = None) -> StepOutcome:
        """Waits for the reductions and updates the parameters. Collective.

        sums: numbers to add up over the ranks as well (the loss, a vote to stop); the same keys on all ranks.
        Raises DivergedError on all ranks after too many skipped steps in a row.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward only accumulates into `.grad` and reduces nothing."""

    def zero_grad(self) -> None:
        """Drops the gradients, as the optimizer's own `zero_grad`. `step` does this too."""

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint must hold in addition to the optimizer's, as JSON."""

    def state_tensors(self) -> list[StateTensor]:
        """Returns this rank's part of the tensors that a checkpoint must hold. Not collective; may be empty."""

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Restores `state` and `state_tensors` of a run with any number of ranks. Collective; between steps.

        tensors: whole tensors by name. Missing tensors start as in a new run; unknown names are ignored.
        """

    def close(self) -> bool:
        """Removes the hooks from the parameters and ends the thread. Not collective.

        Returns False if a reduction hangs. A closed updater cannot step.
        """
