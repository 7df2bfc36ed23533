"""`DistributedOptimizer`, the interface between the training loop and the code that updates parameters from all
ranks' gradients.

It is more general than an all-reduce: a sharded optimizer (reduce-scatter, update of the own part, all-gather), a
parameter server and delayed updates can implement the same Protocol without changes to the training loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor

# Called with the gradients' global 2-norm (nan if they are not finite) and the sums of a step: False drops the step.
# Pure, since every rank must return the same.
Accepts: TypeAlias = Callable[[float, Mapping[str, float]], bool]

# Called with the number of a bucket and the begin and end of its reduction, in seconds of `time.perf_counter`.
ReductionObserver: TypeAlias = Callable[[int, float, float], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardTimes:
    """Times of a step on this rank. backward_s: of its last backward. update_s: after the reduction. ready_s: of each
    bucket, from the begin of that backward until it was complete; bucket_bytes: its size."""

    backward_s: float
    update_s: float
    ready_s: tuple[float, ...]
    bucket_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of one `step`. All fields except the times are the same on all ranks."""

    applied: bool  # False: gradients were not finite, or were not accepted; parameters are unchanged
    grad_norm: float  # global 2-norm before clipping; nan if gradients were not finite
    loss_scale: float  # the factor that was used in this step
    sums: dict[str, float] = field(default_factory=dict)  # the caller's `sums`, summed over the ranks
    sync_s: float = 0.0  # seconds with a reduction in flight
    hidden_sync_s: float = 0.0  # seconds of these in which training went on
    exposed_sync_s: float = 0.0  # seconds in which training was blocked by communication
    update_s: float = 0.0  # seconds of `step` after these
    # None: backward ran outside of the updater, or left buckets incomplete
    times: BackwardTimes | None = None


class DistributedOptimizer(Protocol):
    """Turns the ranks' gradients into the same updated parameters on every rank."""

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """Runs backward on `weight * loss`. Not collective itself; reductions start as gradients become ready.

        loss: one element, of any shape and floating-point dtype; the mean over this rank's samples.
        weight: this micro-batch's share of the global batch (samples / global samples), so that the sum over
            ranks and micro-batches is the mean over the global batch, also with unequal counts.
        last: False for all but the last micro-batch of a step; nothing is reduced after these.
        """

    def step(
        self,
        *,
        sums: Mapping[str, float] | None = None,
        accepts: Accepts | None = None,
        divide_by: str | None = None,
    ) -> StepOutcome:
        """Waits for the reductions and updates the parameters. Collective.

        sums: numbers to add up over the ranks as well (the loss, a vote to stop); the same keys on all ranks.
        accepts: may drop the step on all ranks: parameters, optimizer and loss scale then stay as they are, and the
            next step begins anew. So a rank whose backward failed half-way calls `step` too, and a number in `sums`
            makes all ranks drop it.
        divide_by: name of a number in `sums`: gradients and norm are divided by its sum over the ranks, for losses
            whose weights (numbers of tokens, say) do not add up to 1. If that sum is 0, the step is not applied and the
            loss scale stays.
        Raises UsageError on all ranks if that sum is negative or not finite, for a name that is not in `sums`, and for
        `divide_by` with a wire format with error feedback, unless the weights of each step add up to about 1.
        Raises DivergedError on all ranks after too many steps in a row whose gradients were not finite; the updater can
        be used further, after `load_state`.
        """

    def wait_for_parameters(self) -> None:
        """Waits until the parameters are as `step` has updated them on all ranks. Not collective.

        A sharded optimizer may gather them while training continues. PyTorch's operations on parameters wait by
        themselves; call this before their memory is read in another way, as through a view that was made before.
        """

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """Tells `observer` of each bucket's reduction from now on, on the thread that reduces; None ends that.

        On one rank nothing is reduced. Call it between steps. Not collective.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward only accumulates into `.grad` and reduces nothing."""

    def zero_grad(self) -> None:
        """Drops the gradients, as the optimizer's own `zero_grad`. `step` does this too."""

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint must hold in addition to the optimizer's, as JSON."""

    def state_tensors(self) -> list[StateTensor]:
        """Returns this rank's part of the tensors that a checkpoint must hold. Not collective; may be empty."""

    def rows_to_load(self, state: Mapping[str, Any], shapes: Shapes) -> dict[str, list[range]]:
        """Returns which rows of saved tensors `load_state` needs on this rank; it needs all of the others.

        state: as `load_state` will be given it. shapes: of the whole tensors, by name. Ascending rows, without overlap.
        Not collective.
        """

    def load_state(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """Restores `state` and `state_tensors` of a run with any number of ranks. Collective; between steps.

        tensors: by name, with the dtypes of `state_tensors`: whole, or only the rows (along the first dimension) of
        `rows_to_load`, one after another. shapes: of the whole tensors; None: `tensors` are whole. Missing tensors
        start as in a new run; unknown names are ignored.
        """

    def close(self) -> bool:
        """Removes the hooks from the parameters and ends the thread. Not collective.

        Returns False if a reduction hangs. A closed updater cannot step.
        """


# Which optimizers an updater can step: the others are refused by name when the updater is made. Pure.


# How a model is laid out over the ranks: "none" is a whole copy on each. "stages": a pipeline.
Layout: TypeAlias = Literal["none", "optimizer", "gradients", "parameters", "tensor", "stages"]

_NAMES: dict[Layout, str] = {
    "optimizer": "a sharded optimizer (shard = 'optimizer')",
    "gradients": "sharded gradients (shard = 'gradients')",
    "parameters": "sharded parameters (shard = 'parameters')",
    "tensor": "split layers (tensor > 1)",
    "stages": "a pipeline (pipeline > 1)",
}
# Optimizers whose update of an element depends on the others of its layer.
_WHOLE_LAYERS = ("lars", "lamb", "lbfgs", "muon", "adafactor", "shampoo", "soap")

# Those of PyTorch 2.13 whose `step` fails for DTensors: means over rows and columns, assignments by a mask.
_NOT_ON_PARTS = ("adafactor", "rprop")


def check_optimizer(
    optimizer: torch.optim.Optimizer, *, layout: Layout, model: torch.nn.Module | None = None
) -> None:
    """Raises UsageError, with what to use instead, for an optimizer that cannot be stepped in `layout`.

    model: whose layers must not have sparse gradients where ranks have parts of layers, or stages.
    """
    name = type(optimizer).__name__
    if takes_closure(optimizer):
        raise UsageError(
            f"{name} calls a closure that computes the loss again within a step, and an updater steps on gradients "
            "that are summed already: use AdamW, or SGD with momentum"
        )
    if layout == "none":
        return
    where = _NAMES[layout]
    if takes_sparse_gradients(optimizer):
        raise UsageError(
            f"{name} takes sparse gradients, which {where} does not have: give each rank the whole model, or use "
            "Embedding(sparse=False) and Adam"
        )
    if layout in ("optimizer", "gradients") and is_by_layer(optimizer):
        raise UsageError(
            f"{name} needs whole layers to update an element, such as their norms, of which a rank has a part with "
            f"{where}: use AdamW, Adam or SGD, or leave shard out"
        )
    if layout in ("parameters", "tensor") and _is_one_of(optimizer, _NOT_ON_PARTS):
        raise UsageError(
            f"{name} uses operations that PyTorch does not have for parts of parameters, of which {where} consists: "
            "use AdamW, Adam or SGD, or leave parameters whole"
        )
    sparse = [name for name, module in model.named_modules() if _has_sparse_gradient(module)] if model else []
    if layout in ("parameters", "tensor", "stages") and sparse:
        raise UsageError(
            f"module {sparse[0]!r} has sparse gradients (sparse=True), which are not summed with {where}: make it with "
            "sparse=False, or give each rank the whole model"
        )


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if `step` cannot be called without a closure, as LBFGS's."""
    given = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in given
    )


def takes_sparse_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer refuses dense gradients."""
    return _is_one_of(optimizer, ("sparseadam",))


def is_by_layer(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the update of an element depends on others of its layer, as far as is known."""
    return _is_one_of(optimizer, _WHOLE_LAYERS)


def _is_one_of(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> bool:
    return any(base.__name__.lower() in names for base in type(optimizer).__mro__)


def _has_sparse_gradient(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
