"""What happens around each step of any kind of updater. The decorator `watched` wraps the updater's method `step`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableSet, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import torch

from hpctrain.comm import Collective, all_reduce_values
from hpctrain.distributed import is_sharded_tensor, local_part
from hpctrain.errors import DivergedError, RanksDiffer
from hpctrain.reduce.contract.updater import Accepts, StepOutcome
from hpctrain.reduce.watch.forward_buffers import ForwardBuffers, is_finite
from hpctrain.reduce.watch.rank_comparison import CompareRanks, RankComparison

_NAMED = 3

P = ParamSpec("P")


@final
class StepWatch:
    """Restores the buffers of `model` whenever a step is not applied, and compares the ranks of `comm`.

    groups: function that returns the parameter groups of the updater's optimizer.
    compare_ranks: what happens if the ranks differ; see `how` of `RankComparison`. "off": the ranks are not compared.
    say: function that prints a line for the user, on rank 0.
    together: the watches of all trainings in this process, to which this watch is added. If a step is dropped, buffers
    of the other models that are no longer finite are restored too, for example the buffers of a discriminator after a
    step of the generator.

    The constructor is collective.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        *,
        comm: Collective,
        compare_ranks: CompareRanks,
        say: Callable[[str], None],
        together: MutableSet[StepWatch],
    ) -> None:
        self._model = model
        self._together = together
        together.add(self)
        self._say = say
        self._comm = comm
        self._buffers = ForwardBuffers(model)
        self._said = False
        self._ranks: RankComparison | None = None
        if compare_ranks != "off" and comm.num_ranks > 1:
            self._ranks = RankComparison(
                model, groups, buffers=self._buffers, comm=comm, how=compare_ranks, say=say
            )

    def step(
        self, step: Callable[..., StepOutcome], options: dict[str, Any], *, compares: bool = True
    ) -> StepOutcome:
        """Calls `step(**options)`, a step of the updater, and returns the outcome.

        Collective if the step is collective. compares: False: the ranks are not compared.

        Raises the errors of the step. If the ranks have drifted apart, does not apply the step, and raises RanksDiffer
        on every rank.
        """
        try:
            outcome = self._compared(step, options) if compares else step(**options)
        except DivergedError as error:
            self._end_step(applied=False)
            raise _with_what_is_not_finite(error, self._model) from error
        except BaseException:
            self._end_step(applied=False)
            raise
        self._end_step(applied=outcome.applied)
        return outcome

    def compare(self) -> None:
        """Compares the ranks outside of a step, if a comparison is due. Collective.

        Raises RanksDiffer on every rank if the ranks have drifted apart.
        """
        numbers = self._ranks.numbers() if self._ranks is not None else {}
        if self._ranks is not None and numbers:
            error = self._ranks.error(all_reduce_values(self._comm, numbers))
            if error is not None:
                raise error

    def drop(self) -> None:
        """Restores buffers. Call it for a step that may be skipped without a call of `step`, as by a GradScaler."""
        self._end_step(applied=False)

    def _compared(self, step: Callable[..., StepOutcome], options: dict[str, Any]) -> StepOutcome:
        ranks = self._ranks
        numbers = ranks.numbers() if ranks is not None else {}
        if ranks is None or not numbers:
            return step(**options)
        found: list[RanksDiffer] = []
        asked: Accepts | None = options.get("accepts")

        def accepts(norm: float, sums: Mapping[str, float]) -> bool:
            error = ranks.error(sums)
            if error is not None:
                found.append(error)
                return False
            return asked is None or asked(norm, ranks.without_numbers(sums))

        outcome = step(**{**options, "sums": {**(options.get("sums") or {}), **numbers}, "accepts": accepts})
        if found:
            raise found[0]
        return replace(outcome, sums=ranks.without_numbers(outcome.sums))

    def _end_step(self, *, applied: bool) -> None:
        lost = self._buffers.end_step(applied=applied)
        if not applied:
            for watch in self._together:
                if watch is not self:
                    watch._buffers.mend()
        if lost and not self._said:
            self._said = True
            self._say(
                f"a step was dropped, but what its forward pass changed in {listed(lost)} stays: such large buffers "
                "are not copied before each step, so that they cannot be restored"
            )


class Watched:
    """Base class of the updaters, whose method `step` is decorated with `watched`.

    step_watch: watch of the updater's steps; None: `step` runs without a watch.
    sums_to_one: True if the caller ensures that the weights of each step add up to about 1 over the ranks, so that
    wire formats with error feedback can be used with `divide_by`.
    """

    step_watch: StepWatch | None = None
    sums_to_one = False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        raise NotImplementedError

    # Without a schedule every step is a round of its own.

    @property
    def next_is_local(self) -> bool:
        """See `DistributedOptimizer.next_is_local`."""
        return False

    @property
    def workers_differ(self) -> bool:
        """See `DistributedOptimizer.workers_differ`."""
        return False

    def end_round(self) -> None:
        """See `DistributedOptimizer.end_round`."""

    def common_parameters(self) -> AbstractContextManager[None]:
        """See `DistributedOptimizer.common_parameters`."""
        return nullcontext()


W = TypeVar("W", bound=Watched)


def watch_steps(
    updater: W,
    model: torch.nn.Module,
    *,
    comm: Collective,
    compare_ranks: CompareRanks,
    say: Callable[[str], None],
    together: MutableSet[StepWatch],
) -> W:
    """Gives `updater`, which updates the parameters of `model`, a `StepWatch`, and returns it. Collective."""
    groups = functools.partial(getattr, updater.optimizer, "param_groups")
    updater.step_watch = StepWatch(
        model, groups, comm=comm, compare_ranks=compare_ranks, say=say, together=together
    )
    return updater


def watched(step: Callable[Concatenate[W, P], StepOutcome]) -> Callable[Concatenate[W, P], StepOutcome]:
    """Decorates the method `step` of an updater: the method then runs within the updater's `step_watch`, if set."""

    @functools.wraps(step)
    def watched_step(updater: W, /, *arguments: P.args, **options: P.kwargs) -> StepOutcome:
        if updater.step_watch is None:
            return step(updater, *arguments, **options)
        return updater.step_watch.step(functools.partial(step, updater, *arguments), dict(options))

    return watched_step


def not_finite(model: torch.nn.Module, *, share: int = 0, num_shares: int = 1) -> Iterator[str]:
    """Yields descriptions of the parameters and buffers of a model that contain NaN or infinity. Not collective.

    Of sharded parameters, only this rank's part is checked. If `num_shares` ranks hold the same model, they can divide
    the work: each rank checks the parameters of its `share`, and the rank with share 0 also checks the buffers.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        mine = is_sharded_tensor(parameter) or number % num_shares == share
        if mine and not is_finite(local_part(parameter.detach())):
            yield f"parameter {name!r}"
    for name, buffer in model.named_buffers() if share == 0 else ():
        if not is_finite(local_part(buffer.detach())):
            yield f"buffer {name!r}"


def _with_what_is_not_finite(error: DivergedError, model: torch.nn.Module) -> DivergedError:
    """Returns the error, extended by the names of parameters and buffers that are not finite, if there are any."""
    found = list(not_finite(model))
    if not found:
        return error
    return DivergedError(
        f"{error}. Not finite in the model: {listed(found)}. No learning rate helps then: resume from a checkpoint "
        "of before that",
        agreed=error.agreed,
        reason=error.reason,
    )


def listed(names: Sequence[str]) -> str:
    """Returns one text with the first few names, and the number of the remaining names."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
