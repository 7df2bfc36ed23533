"""Weights the losses of micro-batches, for tasks whose loss is a mean over something other than samples."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils import _pytree

from hpctrain.comm import Collective, describe_ranks, raise_together
from hpctrain.data import Batch
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.train.task.task import Task, has_valid


@final
class LossWeights:
    """The weights of a task's losses on this rank: weights that the task gives, or numbers of samples.

    A task gives weights if it has a method `weight`, or if its `loss` returns a pair (loss, weight). In the first step
    the ranks exchange whether the task gives weights, since a rank without samples cannot know. The ranks also agree on
    a unit: a number by which all weights are divided. After this division, gradients have about the same size as if
    losses were weighted by numbers of samples; this matters for float16. The unit is a power of two, so that the
    division does not round.

    With `every_step` the ranks agree on a unit in each step, so that the weights add up to about 1 over the ranks. The
    weights add up to exactly 1 if the task has a method `weight`, or if a step has one micro-batch. Error feedback
    needs this: the part of the gradients that is not sent in a step is added to the gradients of the next step, and
    both are then divided by the sum of weights of the next step.

    Args:
        task: The task.
        comm: The communicator of all ranks; None: there is one rank.
        counts: False on a rank that computes the same samples as another rank, which counts them.
        unit: The unit of an earlier start of this run; None: the ranks choose a unit.
        every_step: True to agree on a unit in each step.
    """

    def __init__(
        self,
        task: Task,
        *,
        comm: Collective | None = None,
        counts: bool = True,
        unit: float | None = None,
        every_step: bool = False,
    ) -> None:
        method = getattr(task, "weight", None)
        self._method: Callable[..., Any] | None = method if callable(method) else None
        self._method_takes_valid = self._method is not None and has_valid(self._method)
        self._comm = comm
        self._counts = counts
        self._unit = unit
        self._every_step = every_step
        self._given: bool | None = True if self._method is not None else None  # None: not known yet
        self._agreed = False
        self._asks = False  # whether the ranks have still to agree in this step
        self._sum = 0.0
        self._seen = (0.0, 0)  # weights and samples of this step, until the ranks agree
        self.has_method = self._method is not None

    @property
    def may_be_given(self) -> bool:
        """False if it is known that the task gives no weights, so that losses are weighted by numbers of samples."""
        return self._given is not False

    @property
    def unit(self) -> float | None:
        """The number by which weights are divided, for a checkpoint; None if losses are weighted by numbers of samples.

        A weight of one unit counts as much as one sample.
        """
        return self._unit if self._given else None

    @property
    def total(self) -> float | None:
        """The sum of this rank's weights in the last step, divided by `unit` and by the samples of the global batch.

        0 if another rank counts the samples of this rank; None if losses are weighted by numbers of samples.
        """
        if not self._given:
            return None
        return self._sum if self._counts else 0.0

    def begin_step(self) -> None:
        plain = self._agreed and not self._given
        self._sum, self._seen = 0.0, (0.0, 0)
        self._asks = not self._agreed or (self._every_step and not plain)

    def end_step(self) -> None:
        """Ends a step. On a rank that had no loss to weight, takes part in the agreement of the ranks.

        Collective in the first step and, with `every_step` and a task that gives weights, in each step.
        """
        self._agree(given=self._given)

    def of_fields(self, part: Batch) -> float:
        """Returns the weight of a micro-batch from the task's method `weight`. Raises UsageError for a wrong weight."""
        assert self._method is not None
        if part.num_samples == 0:
            return 0.0
        if self._method_takes_valid:
            return _checked(self._method(part.fields, valid=part.valid), of="the task's method weight")
        return _checked(self._method(part.real().fields), of="the task's method weight")

    def agree_before(self, parts: Iterable[Batch]) -> None:
        """Agrees on the weights of a whole step before its losses are computed, if the task has a method `weight`.

        Collective in the first step and, with `every_step`, in each step. Raises UsageError on all ranks for an invalid
        weight.
        """
        if not self._asks or self._method is None:
            return
        found, error = [(0.0, 0)], None
        try:
            found += [(self.of_fields(part), part.num_samples) for part in parts]
        except HpctrainError as caught:
            error = caught
        weights, samples = zip(*found, strict=True)
        self._seen = (math.fsum(weights), sum(samples))
        self._agree(given=True, error=error)

    def weigh(self, returned: Any, part: Batch, *, agrees: bool = True) -> tuple[torch.Tensor, float]:
        """Returns a loss and its weight for `DistributedOptimizer.backward`.

        Collective in a step in which the ranks agree, if `agrees` is True. Raises UsageError for an invalid weight, in
        the first step on all ranks, and if the losses of only some ranks have weights.

        returned: the result of the task's `loss` for `part`.
        part: the micro-batch, which has samples.
        agrees: False if other ranks cannot take part in an agreement at this point. If the unit is not known yet, it is
        then 1, and the ranks agree in `end_step`.
        """
        loss, weight, error = returned, 0.0, None
        given = self._given
        try:
            loss, own = loss_and_weight(returned)
            if own is not None and self._method is not None:
                raise UsageError(
                    "the task has a method weight, and its loss returns a weight too: remove one of them"
                )
            given = own is not None or self._method is not None
            if self._given is not None and given != self._given:
                now, before = ("a weight", "none") if given else ("no weight", "one")
                raise UsageError(
                    f"the task's loss returns {now} now and returned {before} before: return (loss, weight) each time"
                )
            weight = own if own is not None else self.of_fields(part) if given else 0.0
        except HpctrainError as caught:
            error = caught
        self._seen = (self._seen[0] + weight, self._seen[1] + part.num_samples)
        if agrees:
            self._agree(given=given, error=error)
        elif self._asks and error is None:
            self._given, self._unit = given, self._unit or 1.0
        if error is not None:
            raise error
        if not given:
            return loss, part.weight
        factor = weight / (self._unit or 1.0) / max(1, part.global_samples - part.global_skipped)
        self._sum += factor
        return loss, factor

    def _agree(self, *, given: bool | None, error: HpctrainError | None = None) -> None:
        """Exchanges whether the task gives weights, and chooses the unit, by which all weights are divided.

        Collective in a step in which the ranks agree.

        given: True if the task gives weights, False if it does not, None if this rank cannot know.
        error: error of this rank, which all ranks then raise.
        """
        if not self._asks:
            return
        self._asks = False
        weight, samples = self._seen
        has_unit = self._unit is not None  # one of an earlier start, or 1 where weights are in use already
        found = torch.tensor(
            [given is True and samples > 0, given is False, has_unit, weight, samples], dtype=torch.float64
        )
        if self._comm is not None and self._comm.num_ranks > 1:
            raise_together(self._comm, error)
            self._comm.all_reduce(found)
        elif error is not None:
            raise error
        num_given, num_plain, num_units, weights, num_samples = found.tolist()
        if num_given and num_plain:
            self._refuse_mixture(given)
        if not num_samples:
            return
        self._given, self._agreed = bool(num_given), True
        if self._given and self._every_step and weights > 0:
            self._unit = weights / num_samples
        elif self._given and self._unit is None:
            known = num_units > 0 or weights == 0
            self._unit = 1.0 if known else 2.0 ** round(math.log2(weights / num_samples))

    def _refuse_mixture(self, given: bool | None) -> None:
        assert self._comm is not None
        mine = torch.tensor([2 if given is None else int(given)], dtype=torch.int32)
        kinds = self._comm.all_gather(mine, counts=[1] * self._comm.num_ranks).tolist()
        with_weight, without = ([rank for rank, kind in enumerate(kinds) if kind == k] for k in (1, 0))
        raise UsageError(
            f"the task's loss returns a weight on {describe_ranks(with_weight)} and none on {describe_ranks(without)}: "
            "return (loss, weight) on all ranks or on none",
            agreed=True,
        )


def metrics_and_weight(
    returned: Any, *, weights: LossWeights, part: Batch
) -> tuple[Mapping[str, float], float | None]:
    """Returns the metrics and their weight; the weight is None if the metrics are means over samples.

    Raises UsageError for an invalid weight.

    returned: the result of the task's `metrics` for the samples of `part`.
    """
    if isinstance(returned, tuple):
        if len(returned) != 2 or not isinstance(returned[0], Mapping):
            raise UsageError(
                f"the task's metrics returned a tuple of {len(returned)}: return a dict of metrics by name, or a pair "
                "(metrics, weight)"
            )
        return returned[0], _checked(returned[1], of="the task's metrics")
    return returned, weights.of_fields(part) if weights.has_method else None


class OutputsOf:
    """Collects the outputs of a model, for a loss of weight 0.

    Backward of this loss must run too, because backward is collective.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._outputs: list[torch.Tensor] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Collects the model's outputs within the `with` block."""

        def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs += [leaf for leaf in _pytree.tree_leaves(output) if _has_graph(leaf)]

        hook = self._model.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def zero(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss of 0 whose graph contains the outputs.

        `loss` times 0 would not do: the mean over no values is NaN, and so is the gradient of this mean, even times 0.
        Only if there are no outputs, the result is `loss` times 0, with NaN replaced by 0.
        """
        if not self._outputs:
            return torch.nan_to_num(loss) * 0.0
        return torch.stack([(output * 0.0).sum().to(loss.dtype) for output in self._outputs]).sum()


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def loss_and_weight(returned: Any) -> tuple[torch.Tensor, float | None]:
    """Splits the result of a task's `loss` into loss and weight; the weight is None if the result is only a loss.

    Raises UsageError for any other result.
    """
    if isinstance(returned, torch.Tensor):
        return returned, None
    if not isinstance(returned, tuple):
        raise UsageError(
            f"the task's loss returned {type(returned).__name__}: return a tensor, or a pair (loss, weight)"
        )
    if len(returned) != 2:
        raise UsageError(
            f"the task's loss returned a tuple of {len(returned)}: return the loss, or a pair (loss, weight)"
        )
    return returned[0], _checked(returned[1], of="the task's loss")


def _checked(weight: Any, *, of: str) -> float:
    """Returns a weight as a number. Raises UsageError if it is not valid. Waits for the device of a tensor.

    of: the source of the weight, for the message.
    """
    is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    if isinstance(weight, torch.Tensor):
        if weight.dim() != 0 or weight.is_complex() or weight.dtype == torch.bool:
            raise UsageError(
                f"{of} gave a weight of shape {list(weight.shape)} and type {weight.dtype}: give a number or a tensor "
                "of shape ()"
            )
        weight = weight.detach().item()
    elif not is_number:
        raise UsageError(f"{of} gave the weight {weight!r}: give a number or a tensor of shape ()")
    value = float(weight)
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(
            f"{of} gave the weight {value:g}: give a finite number of 0 or more, such as a number of tokens"
        )
    return value


# The mean loss of a step, from its sums over the ranks.


# The name of `LossWeights.total` among the sums of a step, if the task gives weights.
LOSS_WEIGHT = "loss_weight"


def with_mean_loss(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of a step. Under "loss", the weighted mean of the losses replaces the sum of the losses.

    The mean is 0 if all weights are 0.
    """
    weight = sums.get(LOSS_WEIGHT)
    if weight is None:
        return dict(sums)
    return {**sums, "loss": sums["loss"] / weight if weight else 0.0}
