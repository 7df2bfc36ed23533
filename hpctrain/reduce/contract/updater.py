"""The gradient seam: gradients in, updated parameters out.

Not "all-reduce": a sharded optimizer (reduce-scatter, update the own part, all-gather), a parameter server
and delayed updates fit behind the same Protocol, and the training loop does not change.
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
    """What one `step` did. Every field but the seconds is the same on all ranks."""

    applied: bool  # False: gradients were not finite, parameters are unchanged
    grad_norm: float  # global 2-norm before clipping; nan when not applied
    loss_scale: float  # the factor that was used in this step
    sums: dict[str, float] = field(default_factory=dict)  # the caller's `sums`, added over the ranks
    sync_s: float = 0.0  # time the reduction took, on its own thread
    exposed_sync_s: float = 0.0  # time this rank stood still for it


class Updater(Protocol):
    """Turns the ranks' gradients into the same updated parameters on every rank."""

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """Run backward on `weight * loss`. Not collective by itself; reductions start as gradients get ready.

        weight: this micro-batch's share of the global batch (samples / global samples), so that the sum over
            ranks and micro-batches is the mean over the global batch, also with unequal counts.
        last: False for all but the last micro-batch of a step: those send nothing.
        """

    def step(self, *, sums: Mapping[str, float] | None = None) -> StepOutcome:
        """Finish the reduction and update the parameters. Collective.

        sums: numbers to add up over the ranks on the way (the loss, a vote to stop); same keys on all ranks.
        Raises DivergedError on all ranks when the agreed limit of skipped steps is used up.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward only accumulates into `.grad`, and sends nothing."""

    def zero_grad(self) -> None:
        """Forget the gradients, as the optimizer's own `zero_grad`; `step` has done it already."""

    def state(self) -> dict[str, Any]:
        """JSON state that a checkpoint must hold beside the optimizer's own (which is not in it)."""

    def state_tensors(self) -> list[StateTensor]:
        """Tensors that it must hold too: this rank's part of them. Not collective; may be empty."""

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Go on from `state` and the whole tensors, by name, of any number of ranks. Collective; between steps.

        What `tensors` lacks begins as in a new run; names that are not known are passed over.
        """

    def close(self) -> bool:
        """Take the hooks off the parameters and end the thread; whether it has ended. Not collective.

        A closed updater makes no steps.
        """
