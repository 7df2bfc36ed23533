"""The updater of schedules: workers step alone, and average their parameters after a number of steps."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch

from hpctrain.comm import Collective, in_section
from hpctrain.errors import DivergedError, UsageError
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, Shapes, StateTensor
from hpctrain.reduce.contract.updater import Accepts, ReductionObserver, StepOutcome
from hpctrain.reduce.data_parallel.all_reduce_updater import AllReduceUpdater, MeasuredChoice
from hpctrain.reduce.data_parallel.gradient_memory import asks_for_gradients
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.parameter_checks import check_open, trainable
from hpctrain.reduce.schedules.outer_optimizer import OuterOptimizer
from hpctrain.reduce.schedules.parameter_average import NormStatistics, ParameterAverage
from hpctrain.reduce.schedules.rounds import Rounds, StepKind
from hpctrain.reduce.schedules.schedule import Daso, DiLoCo, LocalSteps, table_of
from hpctrain.reduce.schedules.worker_rows import WorkerPlace, WorkerRows, WorkerState
from hpctrain.reduce.watch.step_watch import Watched

# Makes the updater of a phase with this loss scale. Collective over all ranks.
MakeUpdater = Callable[[LossScale], AllReduceUpdater]

# A worker's own updater never ends the run for skipped steps: the ranks decide that together.
_NO_LIMIT = sys.maxsize


@dataclass(slots=True)
class _Vote:
    """The result of a vote.

    totals: sums over the ranks of the caller's numbers.
    num_finite: number of workers whose gradients were finite.
    norm: root mean square of the gradient norms of these workers; nan if there are none.
    step_s: mean duration of a step over the ranks, in seconds.
    diverged: number of workers that have skipped too many steps in a row.
    seconds: duration of the vote on this rank.
    accepted: what the caller's `accepts` returned.
    """

    totals: dict[str, float]
    num_finite: float
    norm: float
    step_s: float
    diverged: float
    seconds: float
    accepted: bool = True


@final
class ScheduledUpdater(Watched):
    """`DistributedOptimizer` whose workers update parameters alone between two averages.

    A worker is a rank, or all ranks of a node. A step multiplies the worker's gradients by the number of workers, since
    weights are shares of the global batch: so the mean over the workers of a step of SGD is the step of all ranks. With
    `every = 1` and SGD without momentum, the parameters are those of synchronous training but for rounding.

    In a local step nothing is sent between workers, and `step` returns numbers of this worker only; see
    `StepOutcome.agreed`. Each worker drops a step whose gradients are not finite, and has a loss scale of its own.
    Clipping limits the norm of a worker's own gradient. With `divide_by`, each worker divides by its own sum.

    The constructor is collective.

    Args:
        optimizer: See `AllReduceUpdater`. Each worker keeps the state of its own optimizer; it is never averaged.
        schedule: The method and its settings.
        comm: Communicator of all ranks.
        place: This rank's place among the workers.
        share: See `ParameterAverage`.
        make_local: Makes the updater that sums gradients within this rank's worker.
        make_synchronous: Makes the updater of the synchronous steps at the start; None if there are none.
        average: The average of the parameters.
        loss_scale: Loss scale of a new run.
        model: Model of the parameters; its batch norm statistics are averaged when a round ends.
        choice: The measured choice of the reducer of `average`; None if the user asked for a reducer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: LocalSteps,
        comm: Collective,
        place: WorkerPlace,
        share: float,
        make_local: MakeUpdater,
        make_synchronous: MakeUpdater | None,
        average: ParameterAverage,
        loss_scale: LossScale,
        model: torch.nn.Module,
        choice: MeasuredChoice | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._comm = comm
        self._place = place
        self._share = share
        self._make_local = make_local
        self._make_synchronous = make_synchronous
        self._average = average
        self._choice = choice
        self._max_skipped_in_row = loss_scale.max_skipped_in_row
        self._first_scale = loss_scale
        self._statistics = NormStatistics(model, comm=comm, share=share)
        self._rows = WorkerRows(optimizer, trainable(optimizer), place=place, comm=comm)
        self._outer = self._new_outer()
        is_daso = isinstance(schedule, Daso)
        self._stays_apart = is_daso  # after an average each worker still holds parameters of its own
        self._rounds = Rounds(
            every=schedule.every, wait=schedule.wait if isinstance(schedule, Daso) else 0,
            from_step=schedule.from_step,
        )  # fmt: skip
        self._observer: ReductionObserver | None = None
        self._closed = False
        self._since_s, self._steps_since = time.perf_counter(), 0
        self._vote_of_step: _Vote | None = None
        self._inner = self._make_inner(loss_scale)

    # ------------------------------------------------------------------ interface of the training loop

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def schedule(self) -> LocalSteps:
        return self._schedule

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of this rank's worker."""
        return replace(self._inner.loss_scale, max_skipped_in_row=self._max_skipped_in_row)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's `param_groups`. Raises UsageError for a GradScaler."""
        if asks_for_gradients(sys._getframe(1)):
            raise UsageError(
                "a GradScaler was given an updater with a schedule: it leaves out a step on some ranks only, which "
                "would then be a step behind. Leave the GradScaler out: pass "
                "loss_scale=hpctrain.LossScale(value=2.0**16, dynamic=True) when the updater is made and call "
                "updater.backward(loss, weight=...)"
            )
        return self._optimizer.param_groups

    @property
    def next_is_local(self) -> bool:
        """See `DistributedOptimizer.next_is_local`."""
        return not self._rounds.is_synchronous and self._rounds.kind is StepKind.LOCAL

    @property
    def workers_differ(self) -> bool:
        """See `DistributedOptimizer.workers_differ`."""
        return not self._rounds.is_synchronous

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """See `DistributedOptimizer.backward`."""
        num_workers = 1 if self._rounds.is_synchronous else self._place.num_workers
        self._inner.backward(loss, weight=weight * num_workers, last=last)

    def no_sync(self) -> AbstractContextManager[None]:
        """See `DistributedOptimizer.no_sync`."""
        return self._inner.no_sync()

    def zero_grad(self) -> None:
        """See `DistributedOptimizer.zero_grad`. Collective over the worker between backward and `step`."""
        self._inner.zero_grad()

    def synchronize(self) -> None:
        """Completes the sums of the gradients within the worker, so that `.grad` can be read. Collective over it."""
        self._inner.synchronize()

    def step(
        self,
        *,
        sums: Mapping[str, float] | None = None,
        accepts: Accepts | None = None,
        divide_by: str | None = None,
    ) -> StepOutcome:
        """See `DistributedOptimizer.step`. Collective over the worker; over all ranks unless `next_is_local`.

        In a step with a vote, `accepts` gets the root mean square of the workers' gradient norms. In a local step it
        gets this worker's norm, and its sums times the number of workers, and decides for this worker alone.
        """
        check_open(closed=self._closed)
        options: dict[str, Any] = {"sums": sums, "accepts": accepts, "divide_by": divide_by}
        run = self._synchronous_step if self._rounds.is_synchronous else self._worker_step
        watch, self._vote_of_step = self.step_watch, None
        if watch is None:
            outcome = run(**options)
        else:
            outcome = watch.step(run, options, compares=self._rounds.is_synchronous)
        vote = self._vote_of_step
        return outcome if vote is None else self._agreed(outcome, vote)

    def wait_for_parameters(self) -> None:
        """Does nothing: the parameters are complete when `step` returns."""

    def end_round(self) -> None:
        """See `DistributedOptimizer.end_round`."""
        if self._rounds.is_synchronous or not (self._rounds.has_begun or self._stays_apart):
            return
        with in_section(self._comm, None):
            if self._rounds.waits is not None:
                self._take_over()
            self._average.start()
            finite, _ = self._average.finish()
            if finite:
                self._step_base()
                self._average.give()
            self._statistics.average()
        self._rounds.end()
        self._compare()

    @contextmanager
    def common_parameters(self) -> Iterator[None]:
        """See `DistributedOptimizer.common_parameters`."""
        with self._average.applied() if self._stays_apart and self.workers_differ else nullcontext():
            yield

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """See `DistributedOptimizer.observe_reductions`: the reductions of averages, and of synchronous steps."""
        self._observer = observer
        self._average.observe(observer)
        if self._rounds.is_synchronous:
            self._inner.observe_reductions(observer)

    def bytes_sent(self) -> int:
        """Returns the payload bytes of averages that this rank has sent to other nodes so far."""
        return self._average.bytes_sent()

    def close(self) -> bool:
        """See `DistributedOptimizer.close`. Waits for an average in flight, which other ranks may be sending."""
        if not self._closed and self._rounds.waits is not None:
            self._average.finish()
        ended = self._average.close()
        ended = self._inner.close() and ended
        self.step_watch = None
        self._closed = True
        return ended

    # ------------------------------------------------------------------ steps

    def _synchronous_step(
        self, *, sums: Mapping[str, float] | None, accepts: Accepts | None, divide_by: str | None
    ) -> StepOutcome:
        decisions: list[bool] = []

        def decided(norm: float, totals: Mapping[str, float]) -> bool:
            decisions.append(accepts is None or accepts(norm, totals))
            return decisions[-1]

        outcome = self._inner.step(sums=sums, accepts=decided, divide_by=divide_by)
        self._check_skipped(float(self._inner.loss_scale.skipped_in_row > self._max_skipped_in_row))
        if all(decisions):
            self._rounds.after_step()
            if not self._rounds.is_synchronous:
                self._begin_rounds()
        return outcome

    def _worker_step(
        self, *, sums: Mapping[str, float] | None, accepts: Accepts | None, divide_by: str | None
    ) -> StepOutcome:
        """Makes a step of this worker, and what follows it. Returns the outcome of this worker."""
        kind, votes = self._rounds.kind, list[_Vote]()
        mine = dict(sums or {})
        of_worker = {name: value * self._place.num_workers for name, value in mine.items()}

        def decided(norm: float, worker_sums: Mapping[str, float]) -> bool:
            if kind is StepKind.LOCAL:
                return accepts is None or accepts(norm, worker_sums)
            vote = self._vote(mine, norm=norm)
            vote.accepted = accepts is None or accepts(vote.norm, vote.totals)
            votes.append(vote)
            return vote.accepted

        outcome = self._inner.step(sums=of_worker, accepts=decided, divide_by=divide_by)
        self._steps_since += 1
        if votes:
            [self._vote_of_step] = votes
            outcome = self._after_vote(outcome, votes[0], kind=kind)
        else:
            self._count_step()
            outcome = replace(outcome, agreed=False, round_ended=False)
        return outcome

    def _vote(self, sums: Mapping[str, float], *, norm: float) -> _Vote:
        """Sums numbers over all ranks. Collective."""
        began = time.perf_counter()
        finite = math.isfinite(norm)
        skipped = self._inner.loss_scale.skipped_in_row + (not finite)
        names = sorted(sums)
        step_s = (began - self._since_s) / max(1, self._steps_since + 1)
        num_workers, num_ranks = self._place.num_workers, self._comm.num_ranks
        own = [finite, norm * norm if finite else 0.0, skipped > self._max_skipped_in_row]
        numbers = torch.tensor(
            [
                *(float(sums[name]) for name in names),
                *(n * self._share * num_workers for n in own),
                step_s / num_ranks,
            ],
            dtype=torch.float64,
        )
        self._comm.all_reduce(numbers)
        *totals, num_finite, square, diverged, mean_s = numbers.tolist()
        num_finite = round(num_finite)
        return _Vote(
            totals=dict(zip(names, totals, strict=True)), num_finite=num_finite,
            norm=math.sqrt(max(0.0, square) / num_finite) if num_finite else math.nan, step_s=mean_s,
            diverged=round(diverged), seconds=time.perf_counter() - began,
        )  # fmt: skip

    def _after_vote(self, outcome: StepOutcome, vote: _Vote, *, kind: StepKind) -> StepOutcome:
        """Counts a step with a vote, unless all ranks have dropped it, and ends the round if it is due. Collective."""
        if vote.diverged:
            self._check_skipped(vote.diverged)
        ends = vote.accepted and kind is StepKind.ENDS_ROUND
        began = time.perf_counter()
        if ends:
            with in_section(self._comm, None):
                if self._rounds.waits is None:
                    self._average.start()
                wait_s, hidden_s = self._take_over()
                self._statistics.average()
        else:
            wait_s = hidden_s = 0.0
        if vote.accepted:
            self._count_step()
        took_s = time.perf_counter() - began
        self._rounds.voted(step_s=vote.step_s)
        self._since_s, self._steps_since = time.perf_counter(), 0
        if ends:
            self._compare()
        return replace(
            outcome,
            round_ended=ends,
            sync_s=outcome.sync_s + vote.seconds + wait_s + hidden_s,
            hidden_sync_s=outcome.hidden_sync_s + hidden_s,
            exposed_sync_s=outcome.exposed_sync_s + vote.seconds + wait_s,
            update_s=max(0.0, outcome.update_s - vote.seconds) + max(0.0, took_s - wait_s),
        )

    def _agreed(self, outcome: StepOutcome, vote: _Vote) -> StepOutcome:
        """Returns the outcome of this worker with what is the same on every rank."""
        return replace(
            outcome, sums=vote.totals, applied=vote.accepted and vote.num_finite > 0, grad_norm=vote.norm
        )

    def _count_step(self) -> None:
        """Counts a step, and starts the average that begins after it and arrives later. Collective in that case."""
        starts = self._rounds.starts_next
        self._rounds.after_step()
        if starts and self._rounds.waits is not None:
            with in_section(self._comm, None):
                self._average.start()

    def _take_over(self) -> tuple[float, float]:
        """Takes over the average in flight. Collective. Returns the seconds of waiting, and those before it.

        A mean change that is not finite is left out: the workers continue with their own parameters.
        """
        began = time.perf_counter()
        finite, took = self._average.finish()
        wait_s = time.perf_counter() - began
        if finite:
            self._step_base()
            self._average.give(weight=self._weight_of_average())
        return wait_s, took.hidden_s

    def _step_base(self) -> None:
        if self._outer is None:
            self._average.add_changes()
        else:
            self._outer.step(self._average.mean_changes)

    def _weight_of_average(self) -> float:
        """Returns the weight of an average that is taken over.

        For DASO, after W steps of waiting and with P workers, parameters become (2 W x own + sum over the workers) /
        (2 W + P) (equation 1 of Coquelin et al. 2022), where the sum is P times the average.
        """
        if not isinstance(self._schedule, Daso):
            return 1.0
        num_workers = self._place.num_workers
        return num_workers / (2 * self._schedule.wait + num_workers)

    def _compare(self) -> None:
        """Compares parameters and settings of the ranks, in few rounds. Collective. Raises RanksDiffer on all ranks."""
        if self.step_watch is not None:
            with self.common_parameters():
                self.step_watch.compare()

    def _check_skipped(self, num_workers: float) -> None:
        """Raises DivergedError on every rank if workers have skipped too many steps in a row."""
        if num_workers:
            limit = self._max_skipped_in_row
            reason = f"more than {limit} steps in a row had gradients that are not finite"
            if not self._rounds.is_synchronous:
                reason += f" on {num_workers:g} of {self._place.num_workers} workers"
            raise DivergedError(
                f"{reason}: the run has diverged. Lower optimizer.lr, raise optimizer.warmup_steps, set "
                "optimizer.clip_norm, or resume from an older checkpoint",
                agreed=True,
                reason=reason,
            )

    # ------------------------------------------------------------------ phases

    def _make_inner(self, scale: LossScale) -> AllReduceUpdater:
        scale = replace(scale, max_skipped_in_row=_NO_LIMIT)
        if self._rounds.is_synchronous:
            assert self._make_synchronous is not None
            made = self._make_synchronous(scale)
            made.observe_reductions(self._observer)
            return made
        return self._make_local(scale)

    def _begin_rounds(self) -> None:
        """Ends the synchronous steps. Collective."""
        scale = self._inner.loss_scale
        self._inner.close()
        self._inner = self._make_inner(scale)
        self._average.begin_again()

    def _new_outer(self) -> OuterOptimizer | None:
        schedule = self._schedule
        if not isinstance(schedule, DiLoCo):
            return None
        return OuterOptimizer(self._average.base, lr=schedule.outer_lr, momentum=schedule.outer_momentum)

    # ------------------------------------------------------------------ in checkpoints

    def state(self) -> dict[str, Any]:
        """See `DistributedOptimizer.state`: also the schedule, and the position in its rounds."""
        choice = {"choice": self._choice.document()} if self._choice is not None else {}
        schedule = {"table": table_of(self._schedule), "rounds": self._rounds.state(), **choice}
        if self._rounds.is_synchronous:
            return {**self._inner.state(), "schedule": schedule}
        # The same on every rank; `WorkerRows` has those of each worker.
        return {"loss_scale": asdict(self._first_scale), "order": None, "schedule": schedule}

    def state_tensors(self) -> list[StateTensor]:
        """See `DistributedOptimizer.state_tensors`. Waits for an average in flight, which is saved too.

        Saved are the residuals of error feedback, the outer momentum, the newest average if parameters differ from it,
        and, as one row per worker, what each worker holds of its own; see `WorkerRows`.
        """
        if self._rounds.is_synchronous:
            return self._inner.state_tensors()
        self._average.finish()
        apart = self._stays_apart or self._rounds.has_begun
        found = self._average.state(with_base=apart, with_arrived=self._rounds.waits is not None)
        if self._outer is not None:
            found += self._outer.state()
        own = WorkerState(scale=self._inner.loss_scale, order=self._inner.order)
        return found + self._rows.state(own, with_parameters=apart)

    def prepare_to_load(self, state: Mapping[str, Any]) -> None:
        """See `DistributedOptimizer.prepare_to_load`."""
        if self._rounds.is_synchronous:
            self._inner.prepare_to_load(state)
        saved = (state.get("schedule") or {}).get("choice")
        if self._choice is not None and saved is not None and self._choice.can_become(saved):
            self._average.finish()
            reducer: BucketReducer
            reducer, bucket_bytes = self._choice.become(saved)
            self._average.use(reducer, bucket_bytes=bucket_bytes)
            self._outer = self._new_outer()

    def rows_to_load(self, state: Mapping[str, Any], shapes: Shapes) -> dict[str, list[range]]:
        """See `DistributedOptimizer.rows_to_load`."""
        return {**self._average.rows_to_load(shapes), **self._rows.rows_to_load(shapes)}

    def load_state(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """See `DistributedOptimizer.load_state`.

        As many workers as in the saved run continue to the bit. Another number of workers begins with the mean of the
        workers' parameters and optimizer states. A checkpoint of a run without a schedule begins the first round; its
        steps do not count for `from_step`.
        """
        self._inner.check_between_steps()
        self.prepare_to_load(state)
        self._average.finish()
        tensors = tensors or {}
        saved = state.get("schedule")
        was_synchronous = self._rounds.is_synchronous
        if saved is not None:
            self._rounds.load_state(saved["rounds"])
            if saved["table"]["method"] != self._schedule.METHOD or not isinstance(self._schedule, Daso):
                self._rounds.waits = None
        else:
            self._rounds.load_state({"step": 0, "done": 0, "waits": None})
        own = WorkerState(scale=self._first_scale.continued(state["loss_scale"]), order=state["order"])
        own = self._rows.load(own, tensors, shapes)
        self._average.load_state(tensors, shapes)
        if self._outer is not None:
            self._outer.load_state(tensors)
        if self._rounds.is_synchronous != was_synchronous:
            self._inner.close()
            self._inner = self._make_inner(own.scale)
        self._inner.load_state({**state, "loss_scale": asdict(own.scale), "order": own.order})
        self._since_s, self._steps_since = time.perf_counter(), 0
