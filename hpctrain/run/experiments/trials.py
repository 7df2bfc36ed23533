"""Runs trials: the same training from its start, under chosen conditions."""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from hpctrain.checkpoint import CheckpointSave, SaveOptions
from hpctrain.comm import Monitored, SerialWorld, raise_together
from hpctrain.distributed import is_sharded
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.run.experiments.measuring.own_state import NoDropout, OwnState, of_schedulers, stir
from hpctrain.run.experiments.measuring.trace import Failure, RunTrace, StepRecorder
from hpctrain.run.experiments.subject import Setting, Subject, Trial
from hpctrain.topology import Topology
from hpctrain.train import (
    Position,
    TrainingState,
    capture_generators,
    options_of,
    restore_generators,
    resume,
)

# The sessions of trials: one of this rank alone, and one of all ranks, over communication that stays open.


def alone(session: Any) -> Any:
    """Returns a session of one rank, on this rank's device, that does not communicate."""
    cores = session.gather_cores()[session.rank]
    world = Monitored(SerialWorld(), timeout_s=session.world.limits.settings.timeout_s)
    topology = Topology.from_node_names([session.identity.node_name])
    world.place(topology)
    return type(session)(
        identity=session.identity, world=world, topology=topology, device=session.device, cores=[cores]
    )


def together(session: Any) -> Any:
    """Returns a new session of all ranks that uses the communication of `session`. Collective."""
    return type(session)(
        identity=session.identity, world=session.world, topology=session.topology, device=session.device,
        cores=session.gather_cores(),
    )  # fmt: skip


def sum_exactly(session: Any) -> None:
    """Makes the session's updaters sum gradients in each step, in their own dtype, by a fixed algorithm.

    The updaters do not compare the ranks. The runs of a check must continue after a difference between ranks, so that
    the check finds where the difference starts.
    """
    session.distributed_optimizer = partial(_exact_updater, session.distributed_optimizer)


def _exact_updater(make: Any, model: torch.nn.Module, *args: Any, **options: Any) -> Any:
    algorithm = "auto" if is_sharded(model) else "flat"  # of a sharded model: FSDP2's own operation
    exact = {"wire": "fp32", "algorithm": algorithm, "compare_ranks": "off", "schedule": None}
    return make(model, *args, **{**options, **exact})


def sum_during_backward(session: Any) -> None:
    """Makes updaters sum gradients on a thread during backward, even if ranks have no spare core for this thread."""
    session.reductions.overlap = lambda **_: True


# Runs trials.


_DELAY_S = 0.05
_MAX_TEXT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The conditions of a trial, which is one short run of the checked training.

    Attributes:
        on_ranks: Whether all ranks train together; otherwise each rank trains alone.
        micro_batches: The number of micro-batches per step.
        dropout: Whether dropout is on.
        delayed: Whether the ranks are delayed before each step by different times, and gradients are summed during
            backward.
        whole: Whether every rank computes all samples.
        seed_change: The number that is added to the generators' seed.
        stop_at: The number of steps after which the trial is stopped and resumed with a new model; None: not stopped.
        carried: Which of the user's values that the checkpoint lacks are copied from the stopped trial to the resumed
            trial. `generator`: random number generators; `value`: all other values; None: no values.
        stirred: How many numbers are drawn from each of the user's own generators before the first step.
    """

    on_ranks: bool = False
    micro_batches: int = 1
    dropout: bool = True
    delayed: bool = False
    whole: bool = False
    seed_change: int = 0
    stop_at: int | None = None
    carried: str | None = None
    stirred: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """The result of a trial, which is one short run of the checked training.

    Attributes:
        trace: The record of all steps; if the trial was resumed, of the steps after the resumption.
        began: The user's own state at the start.
        ended: The user's own state at the end.
        is_split: Whether each rank holds only a part of the model.
        carried: The kinds of the values that were carried over into the resumed trial, by path.
        schedulers: For a trial on all ranks, the values of the learning rate schedulers at the end, as text by path.
        no_storage: The error to show to the user if checkpoints could not be written or read; None otherwise.
    """

    trace: RunTrace
    began: OwnState
    ended: OwnState
    is_split: bool = False
    carried: dict[str, str] = field(default_factory=dict)
    schedulers: dict[str, str] = field(default_factory=dict)
    no_storage: CheckpointError | None = None


@final
class Trials:
    """Runs trials: short runs of the subject's training.

    `run` and `open` are collective over all ranks, even for trials of one rank.
    """

    def __init__(
        self, subject: Subject, session: Any, *, steps: int, double: bool, first_state: OwnState
    ) -> None:
        self.subject = subject
        self.session = session
        self.steps = steps
        self.double = double
        self._first_state = first_state
        self._num_saved = 0
        self._has_shown = False

    @contextlib.contextmanager
    def open(self, *, on_ranks: bool, seed_change: int = 0, overlapped: bool = False) -> Iterator[Trial]:
        """Creates a trial (model, optimizer and data, ready to train), and closes the trial after the `with` block.

        on_ranks: whether all ranks train together.
        seed_change: the number that is added to the generators' seed.
        overlapped: whether gradients are summed during backward.
        """
        session = together(self.session) if on_ranks else alone(self.session)
        if overlapped:
            sum_during_backward(session)
        with self._quiet():
            try:
                self._as_at_first()
                trial = self.subject.open(session, Setting(double=self.double, seed_change=seed_change))
                try:
                    yield trial
                finally:
                    trial.close()
            finally:
                session.end_training()
                if not on_ranks:
                    session.world.close()

    def _as_at_first(self) -> None:
        """Restores the global variables of the user's Python modules to their values before the first trial."""
        now = OwnState.of(self.subject.variables())
        self._first_state.put_into(self.subject.variables(), now.changed_since(self._first_state))

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Suppresses what the user's code prints, except in the first trial."""
        if not self._has_shown:
            self._has_shown = True
            yield
            return
        with contextlib.redirect_stdout(io.StringIO()):
            yield

    def run(self, conditions: Conditions) -> Ran:
        """Runs one trial under `conditions`, and returns the result. An error that ends the training is recorded there.

        Raises CheckpointError on every rank if the storage fails while a trial is stopped and resumed.
        """
        if conditions.stop_at is None:
            return self._train(conditions, start=0, stop=self.steps)
        self._num_saved += 1
        own = "ranks" if conditions.on_ranks else f"rank-{self.session.rank}"
        folder = self.subject.scratch / f"{own}-{self._num_saved}"
        ran = self._train(conditions, start=0, stop=conditions.stop_at, save_in=folder)
        if ran.trace.failure is None:
            ran = self._train(
                conditions, start=conditions.stop_at, stop=self.steps, load_from=folder, stopped=ran
            )
        raise_together(self.session.world, ran.no_storage)
        return ran

    def _train(
        self,
        conditions: Conditions,
        *,
        start: int,
        stop: int,
        save_in: Path | None = None,
        load_from: Path | None = None,
        stopped: Ran | None = None,
    ) -> Ran:
        with contextlib.ExitStack() as stack:
            trial = stack.enter_context(
                self.open(
                    on_ranks=conditions.on_ranks,
                    seed_change=conditions.seed_change,
                    overlapped=conditions.delayed,
                )
            )
            source = trial
            if conditions.whole:
                source = stack.enter_context(self.open(on_ranks=False))
            if not conditions.dropout:
                stack.enter_context(NoDropout())
            # As at a run's first `load_state`: the optimizer's options are those after the schedulers were made.
            state = replace(
                trial.session.trainings.state(trial.updater, seed=0, also=trial.also),
                made_with=options_of(trial.optimizer),
            )
            stir(trial.roots(), conditions.stirred)
            began = OwnState.of(trial.roots())
            carried: dict[str, str] = {}
            no_storage: CheckpointError | None = None
            failed: Failure | None = None
            if load_from is not None and stopped is not None:
                try:
                    self._load(trial, state, load_from)
                except HpctrainError as error:
                    failed = _failure(error, step=start)
                    no_storage = _error_of_storage(error, self.subject.scratch)
                if conditions.carried is not None:
                    changed = stopped.ended.changed_since(stopped.began)
                    generators = conditions.carried == "generator"
                    carried = {p: k for p, k in changed.items() if (k == "generator") == generators}
                    stopped.ended.put_into(trial.roots(), carried)
            recorder = stack.enter_context(StepRecorder(trial))
            recorder.trace.failure = failed or self._steps(
                trial,
                source,
                recorder,
                conditions=conditions,
                start=start,
                stop=stop,
                is_resumed=load_from is not None,
            )
            if recorder.trace.failure is not None and not trial.is_split:
                recorder.trace.unfinished = recorder.unfinished()
            if save_in is not None and recorder.trace.failure is None:
                try:
                    self._save(trial, state, save_in, step=stop)
                except HpctrainError as error:
                    recorder.trace.failure = _failure(error, step=stop)
                    no_storage = _error_of_storage(error, self.subject.scratch)
            return Ran(
                trace=recorder.trace, began=began, ended=OwnState.of(trial.roots()),
                is_split=trial.is_split, carried=carried, no_storage=no_storage,
                schedulers=of_schedulers(trial.roots()) if conditions.on_ranks else {},
            )  # fmt: skip

    def _steps(
        self,
        trial: Trial,
        source: Trial,
        recorder: StepRecorder,
        *,
        conditions: Conditions,
        start: int,
        stop: int,
        is_resumed: bool,
    ) -> Failure | None:
        number, per_epoch = start, source.batches_per_epoch
        device = trial.session.device
        loaded = capture_generators(device) if is_resumed else None
        try:
            while number < stop:
                epoch, skip = divmod(number, per_epoch)
                first = number
                with contextlib.closing(closable(source.batches(epoch, skip=skip))) as batches:
                    for batch in batches:
                        if loaded is not None and skip and number == start:
                            # A DataLoader draws a number when its epoch begins, which was before the stop.
                            restore_generators(loaded, device=device, otherwise=0)
                        if conditions.whole:
                            batch = trial.repeated(batch, self.session.world_size)
                        if conditions.delayed:
                            time.sleep(_DELAY_S * ((self.session.rank + number) % self.session.world_size))
                        with recorder.step(batch) as losses:
                            losses.append(trial.step(batch, micro_batches=conditions.micro_batches))
                        number += 1
                        if number == stop:
                            break
                if number == first:
                    return Failure(kind="DataError", text=f"epoch {epoch} has no batches", step=number + 1)
                if number < stop:
                    per_epoch = skip + number - first  # for a loader without a length
        except Exception as error:  # the user's code may raise anything
            return _failure(error, step=number + 1)
        return None

    # ------------------------------------------------------------------ checkpoints

    def _save(self, trial: Trial, state: TrainingState, folder: Path, *, step: int) -> None:
        trial.updater.wait_for_parameters()
        captured = state.capture(Position(step=step), comm=trial.session.world, identity={})
        CheckpointSave.begin(
            captured, directory=folder, step=step, comm=trial.session.world, options=SaveOptions()
        ).finish()

    def _load(self, trial: Trial, state: TrainingState, folder: Path) -> None:
        # A new process has drawn other numbers from its generators.
        torch.rand(1), np.random.rand(), random.random()
        resume(state, source=folder, named=True, comm=trial.session.world, identity={})


def _failure(error: Exception, *, step: int) -> Failure:
    return Failure(kind=type(error).__name__, text=str(error)[:_MAX_TEXT], step=step)


def _error_of_storage(error: HpctrainError, folder: Path) -> CheckpointError | None:
    """Returns the error to show to the user if the storage, not the training, caused `error`; None otherwise."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return CheckpointError(
                f"the check's own checkpoints cannot be kept in {folder} ({cause.strerror or cause}): give --scratch "
                "(scratch of session.check) a folder that all nodes share and that has room for a few checkpoints of "
                "this model"
            )
        cause = cause.__cause__
    return None


def closable(batches: Iterator[Any]) -> Generator[Any, None, None]:
    """Returns the iterator as a generator, whose `close` also closes the iterator."""
    try:
        yield from batches
    finally:
        close: Callable[[], object] | None = getattr(batches, "close", None)
        if close is not None:
            close()
