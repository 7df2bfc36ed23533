"""`DistributedOptimizer`: the interface between a training loop and the code that updates the parameters.

The interface covers more than an all-reduce: a sharded optimizer (reduce-scatter, update of each rank's shard,
all-gather), a parameter server or delayed updates can implement the same Protocol without changes to the training loop.
`check_optimizer` refuses the PyTorch optimizers that an updater cannot step.
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

# Called with the number of a bucket and the start and end of its reduction, in seconds of `time.perf_counter`.
ReductionObserver: TypeAlias = Callable[[int, float, float], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardTimes:
    """Times of one step on this rank, and the sizes of its buckets.

    backward_s: duration of the step's last backward, in seconds.
    update_s: duration of the update after the reduction, in seconds.
    ready_s: for each bucket, seconds from the start of that backward until all gradients of the bucket were ready.
    bucket_bytes: size of each bucket, in bytes.
    """

    backward_s: float
    update_s: float
    ready_s: tuple[float, ...]
    bucket_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of `DistributedOptimizer.step`. All fields except the times are the same on every rank.

    With a schedule, `loss_scale` is that of this rank's worker, and a step that is not `agreed` has the outcome of the
    worker.

    Attributes:
        applied: False if the step was dropped, because gradients were not finite, or `accepts` returned False. The
            parameters are then unchanged.
        grad_norm: Global 2-norm of the gradients before clipping; nan if they were not finite.
        loss_scale: Loss scale that was used in this step.
        sums: The numbers that the caller passed as `sums`, summed over the ranks.
        sync_s: Seconds during which a reduction was in flight.
        hidden_sync_s: Part of `sync_s` during which training continued.
        exposed_sync_s: Seconds during which communication blocked training.
        update_s: Seconds of `step` after the reductions.
        times: Times of the backward pass and of the buckets; None if backward ran outside of the updater, or if
            buckets were incomplete when backward ended.
        agreed: False after a local step of a schedule: the outcome is this worker's, and may differ on other workers.
            `sums` are then the sums over the worker's ranks, times the number of workers.
        round_ended: True if all ranks hold the same parameters now; with DASO, if a new average has arrived. Always
            True without a schedule.
    """

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
    agreed: bool = True  # False: the outcome of this worker only
    round_ended: bool = True  # all ranks hold the same parameters


class DistributedOptimizer(Protocol):
    """Turns the gradients of all ranks into the same updated parameters on every rank.

    With a schedule, ranks hold the same parameters only when a round ends: see `StepOutcome.round_ended`.
    """

    @property
    def next_is_local(self) -> bool:
        """True if the next step exchanges nothing between workers, so that its outcome is not `agreed`.

        The same on every rank. Always False without a schedule.
        """

    @property
    def workers_differ(self) -> bool:
        """True if parameters or optimizer states may differ between ranks. The same on every rank.

        A checkpoint then holds those of rank 0, and `state_tensors` what the other workers hold.
        """

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """Runs backward on `weight * loss`.

        Not collective; the reduction of each bucket starts as soon as its gradients are ready.

        Args:
            loss: Mean loss over this rank's samples: a tensor with one element, of any shape and floating-point dtype.
            weight: This micro-batch's share of the global batch (samples / global samples). The sum over ranks and
                micro-batches is then the mean over the global batch, also if the ranks have different numbers of
                samples.
            last: True for the last micro-batch of a step. The gradients of earlier micro-batches are only accumulated.
        """

    def step(
        self,
        *,
        sums: Mapping[str, float] | None = None,
        accepts: Accepts | None = None,
        divide_by: str | None = None,
    ) -> StepOutcome:
        """Waits for the reductions and updates the parameters. Collective.

        A rank whose backward failed half-way must call `step` too. It can then report the failure as a number in
        `sums`, from which `accepts` drops the step on all ranks.

        Args:
            sums: Numbers to sum over the ranks together with the gradients (the loss, a vote to stop). Every rank
                passes the same keys.
            accepts: Function of the global gradient norm and the sums. If `accepts` returns False, the step is dropped
                on all ranks: parameters, optimizer and loss scale do not change. `accepts` must return the same on
                every rank.
            divide_by: Name of a number in `sums`. Gradients and norm are divided by the sum of this number over the
                ranks. Use it if the weights of the losses (numbers of tokens, for example) do not add up to 1. If the
                sum is 0, the step is dropped and the loss scale does not change.

        Returns:
            The outcome of the step.

        Raises:
            UsageError: On all ranks. The sum for `divide_by` is negative or not finite; `divide_by` is not in `sums`;
                or `divide_by` is used with a wire format with error feedback, although the weights of each step do not
                add up to about 1.
            DivergedError: On all ranks. Too many consecutive steps had gradients that were not finite. The updater
                can still be used after `load_state`.
        """

    def wait_for_parameters(self) -> None:
        """Waits until the parameters have the values that the last `step` computed on all ranks. Not collective.

        A sharded optimizer may gather parameters while training continues. PyTorch operations on the parameters wait
        by themselves. Call this before the memory is read in another way, for example through a view that was
        created earlier.
        """

    def end_round(self) -> None:
        """Averages the parameters over the workers now, so that all ranks hold the same. Collective.

        Call it between steps, for example after the last one. Does nothing if all ranks hold the same parameters.
        """

    def common_parameters(self) -> AbstractContextManager[None]:
        """Returns a context in which the parameters are the newest average, which all ranks share. Not collective.

        Use it to evaluate after a step with `round_ended`. Outside of DASO the parameters are the newest average then,
        and the context does nothing.
        """

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """Sets a function that is called after the reduction of each bucket, on the thread that reduces.

        Not collective. Call it between steps. Nothing is observed in a run of one rank, which has no reductions.

        Args:
            observer: Function of three arguments: the index of the bucket, and the start and end of its reduction, in
                seconds of `time.perf_counter`. None removes the observer.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward only accumulates gradients in `.grad`, without any reduction."""

    def zero_grad(self) -> None:
        """Drops the gradients, like the optimizer's own `zero_grad`. `step` does this too."""

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint must hold in addition to the optimizer's state, as values for JSON."""

    def state_tensors(self) -> list[StateTensor]:
        """Returns this rank's part of the tensors that a checkpoint must hold; possibly none. Not collective."""

    def prepare_to_load(self, state: Mapping[str, Any]) -> None:
        """Changes to the reduction of the saved run, if measurements chose the reductions of both runs.

        Collective; call it between steps. With another algorithm, wire format or bucket size than in the saved run, the
        sums would be rounded in another way. So algorithm, wire format and bucket size of the saved run are used, if
        they are available here and the ranks are placed on nodes as in the saved run.

        Args:
            state: The saved state that `load_state` will get.
        """

    def rows_to_load(self, state: Mapping[str, Any], shapes: Shapes) -> dict[str, list[range]]:
        """Returns the rows of saved tensors that `load_state` needs on this rank. Not collective.

        Args:
            state: The saved state that `prepare_to_load` got, and `load_state` will get.
            shapes: Shapes of the whole saved tensors, by name.

        Returns:
            For some tensors, by name, the row ranges that this rank needs: ascending, without overlap. For tensors that
                are not in the result, `load_state` needs all rows.
        """

    def load_state(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """Restores `state` and `state_tensors` that a run with any number of ranks has saved.

        Collective; call it between steps.

        Args:
            state: What `state` returned when the checkpoint was saved.
            tensors: Saved tensors by name, with the dtypes of `state_tensors`. Each is either whole, or the
                concatenation of the rows from `rows_to_load` (along the first dimension). A missing tensor starts as
                in a new run; an unknown name is ignored.
            shapes: Shapes of the whole tensors, by name; None if `tensors` are whole.
        """

    def close(self) -> bool:
        """Removes the hooks from the parameters and ends the reduction thread. Not collective.

        The updater cannot step afterwards.

        Returns:
            False if the thread did not end, because a reduction hangs.
        """


# How a model is laid out over the ranks. "none": each rank has a whole copy. "stages": a pipeline.
Layout: TypeAlias = Literal["none", "optimizer", "gradients", "parameters", "tensor", "stages"]

_NAMES: dict[Layout, str] = {
    "optimizer": "a sharded optimizer (shard = 'optimizer')",
    "gradients": "sharded gradients (shard = 'gradients')",
    "parameters": "sharded parameters (shard = 'parameters')",
    "tensor": "split layers (tensor > 1)",
    "stages": "a pipeline (pipeline > 1)",
}
# Optimizers whose update of one element depends on the other elements of its layer.
_WHOLE_LAYERS = ("lars", "lamb", "lbfgs", "muon", "adafactor", "shampoo", "soap")

# Optimizers of PyTorch 2.13 whose `step` fails for DTensors: means over rows and columns, assignments by a mask.
_NOT_ON_PARTS = ("adafactor", "rprop")


def check_optimizer(
    optimizer: torch.optim.Optimizer, *, layout: Layout, model: torch.nn.Module | None = None
) -> None:
    """Raises UsageError if the optimizer does not work with this layout of the model. The message says what to use.

    model: the model. If ranks hold parts of layers or pipeline stages, the modules of the model must not have sparse
    gradients. None: the modules are not checked.
    """
    name = type(optimizer).__name__
    if takes_closure(optimizer):
        raise UsageError(
            f"{name} calls a closure that computes the loss again within a step, but an updater steps on gradients "
            "that are already summed: use AdamW, or SGD with momentum"
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
            f"{name} needs whole layers to update an element, for example the norm of a layer, but with {where} a rank "
            "has only parts of layers: use AdamW, Adam or SGD, or leave shard out"
        )
    if layout in ("parameters", "tensor") and _is_one_of(optimizer, _NOT_ON_PARTS):
        raise UsageError(
            f"{name} uses operations that PyTorch does not have for parts of parameters, and with {where} a rank has "
            "only such parts: use AdamW, Adam or SGD, or leave parameters whole"
        )
    sparse = [name for name, module in model.named_modules() if _has_sparse_gradient(module)] if model else []
    if layout in ("parameters", "tensor", "stages") and sparse:
        raise UsageError(
            f"module {sparse[0]!r} has sparse gradients (sparse=True), which are not summed with {where}: make it with "
            "sparse=False, or give each rank the whole model"
        )


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer's `step` requires a closure, as LBFGS's does."""
    given = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in given
    )


def takes_sparse_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer accepts only sparse gradients."""
    return _is_one_of(optimizer, ("sparseadam",))


def is_by_layer(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer's update of one element depends on other elements of its layer.

    Such optimizers are recognized by the names of their classes.
    """
    return _is_one_of(optimizer, _WHOLE_LAYERS)


def _is_one_of(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> bool:
    return any(base.__name__.lower() in names for base in type(optimizer).__mro__)


def _has_sparse_gradient(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
