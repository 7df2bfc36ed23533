"""The training loop of a recipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint import State
from hpctrain.comm import RULES, Collective, Section, SectionLimits, broadcast_tensors, in_section
from hpctrain.data import Batch, EpochIterator, Loader
from hpctrain.distributed import pipeline_of
from hpctrain.errors import CheckpointError, DataError, DivergedError, StoppedEarly, UsageError
from hpctrain.reduce import StepOutcome
from hpctrain.telemetry import in_words, write_json
from hpctrain.train.loop.checkpointing import Checkpointing, with_quality
from hpctrain.train.loop.evaluate import agreed_batches, evaluate
from hpctrain.train.loop.guards import Guards
from hpctrain.train.loop.recorder import RunRecorder
from hpctrain.train.loop.settings import LoopSettings, Totals
from hpctrain.train.loop.stopping import EarlyEnd
from hpctrain.train.loop.waiting import WaitingForRound
from hpctrain.train.state.training_state import FiniteCheck, Resumed, TrainingState
from hpctrain.train.task.loss_weights import LOSS_WEIGHT, with_mean_loss
from hpctrain.train.task.schedule import LR_SCALE, Schedule, set_lr
from hpctrain.train.task.task_runner import Runner
from hpctrain.train.watch import (
    NO_COMPARISON,
    WINDOW_ENDS,
    DataFaults,
    EfficiencyWatch,
    StepTracer,
    StragglerWatch,
)

# How long the sections of a run's steps take: agreed through the sums of the steps, for the time limits of
# waits.


LIMITS_FILE = "limits.json"
# The limits are recorded again when one has changed by this factor.
_RECORDED_AT_FACTOR = 1.5


@final
class SectionTimes:
    """Measures how long sections of the training (step, input, save) take, to derive time limits of waits.

    Each rank contributes its times of the previous step to the sums of a step, divided by the number of ranks. So all
    ranks use the same times, the means over the ranks. A mean is close to the longest time, since the ranks wait for
    each other in every step and save.

    limits: the limits of this rank's waits.
    directory: the run directory, where rank 0 records the limits.
    """

    def __init__(self, limits: SectionLimits, *, comm: Collective, directory: Path) -> None:
        self.limits = limits
        self._comm = comm
        self._path = directory / LIMITS_FILE if comm.rank == 0 else None
        self._mine: dict[Section, float] = {}
        self._recorded: dict[Section, float] = {}

    def votes(self) -> dict[str, float]:
        """Returns the numbers that this rank adds to the sums of a step, by name. Not collective.

        The names are the same on every rank.
        """
        measured = (Section.STEP, Section.INPUT, Section.SAVE)
        return {
            f"{section.value}_s": self._mine.get(section, 0.0) / self._comm.num_ranks for section in measured
        }

    def agreed(self, sums: Mapping[str, float], *, step: int) -> None:
        """Updates the limits. Not collective.

        sums: the votes, summed over the ranks.
        """
        for section in (Section.STEP, Section.INPUT, Section.SAVE):
            if (seconds := sums[f"{section.value}_s"]) > 0:
                self.limits.measure(section, seconds)
                self._record(section, step)
        self._mine = {}

    def step_ended(self, seconds: Mapping[str, float], *, is_usual: bool) -> None:
        """Stores this rank's times of a step.

        seconds: the seconds of the step, by name.
        is_usual: False if the duration of the step does not predict the duration of later steps. An example is the
        first step, which compiles and fills caches. The same on every rank.
        """
        if is_usual:
            self._mine[Section.STEP] = seconds["step"] - seconds["checkpoint"] - seconds["evaluation"]
            self._mine[Section.INPUT] = seconds["input"]
        save_s = max(seconds["checkpoint"], seconds.get("own_write", 0.0))
        if save_s > 0:
            self._mine[Section.SAVE] = save_s

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields `batches`. The wait for each batch is under the time limit of the input section.

        The wait for the first batch has no limit, since it includes opening the epoch.
        """
        iterator = iter(batches)
        section: Section | None = None
        while True:
            with in_section(self._comm, section):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch
            section = Section.INPUT

    def _record(self, section: Section, step: int) -> None:
        """Writes `limits.json` if the derived limit of a section has changed by a factor of 1.5 or more."""
        slowest_s, num_measured = self.limits.slowest(section)
        if self._path is None or num_measured < RULES[section].least_measured:
            return
        seconds = self.limits.settings.derived_s(section, slowest_s=slowest_s)
        before_s = self._recorded.get(section)
        if before_s is not None and 1 / _RECORDED_AT_FACTOR < seconds / before_s < _RECORDED_AT_FACTOR:
            return
        self._recorded[section] = seconds
        found = {"time": time.time(), "step": step, "sections": self.limits.record()}
        try:
            write_json(self._path, found)
        except OSError as error:  # a full disk must not end the training
            print(f"hpctrain: {self._path} was not written: {error.strerror}", file=sys.stderr, flush=True)


def read_slowest(directory: Path) -> dict[str, float]:
    """Returns the slowest time of each section, in seconds, that earlier attempts have recorded in a run directory.

    Returns {} if no times are recorded.
    """
    try:
        sections = json.loads((directory / LIMITS_FILE).read_text(encoding="utf-8"))["sections"]
        return {name: float(found["slowest_s"]) for name, found in sections.items() if found["slowest_s"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


# The training loop.


@final
class Training:
    """Trains until the last step, or until the run has to stop. All methods are collective, except `totals`.

    Args:
        runner: The runner that computes losses and gradients with the model of `state`.
        state: The state that is trained and saved.
        loader: The loader of the training data.
        held_out: The loader for evaluations; None: no evaluations.
        identity: The data and order in which a position is valid; see `data_identity`.
        stopping: The object that decides when to stop early.
        guards: The guards against divergence, lack of memory and unequal shares of the data.
        stragglers: The watch that compares the speeds of the ranks; None: speeds are not compared.
        efficiency: The watch that adds up how the ranks spend their time.
        trace: The tracer of chosen steps.
        times: The measurement of sections, from which the time limits of waits are derived.
        resumed: The position and checkpoint from which to start.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        state: TrainingState,
        loader: Loader,
        held_out: Loader | None,
        schedule: Schedule,
        settings: LoopSettings,
        comm: Collective,
        checkpoints: Checkpointing,
        recorder: RunRecorder,
        stopping: EarlyEnd,
        guards: Guards,
        stragglers: StragglerWatch | None,
        efficiency: EfficiencyWatch,
        trace: StepTracer,
        times: SectionTimes,
        identity: Mapping[str, Any],
        resumed: Resumed,
    ) -> None:
        self._runner = runner
        self._state = state
        self._loader = loader
        self._held_out = held_out
        self._schedule = schedule
        self._settings = settings
        self._comm = comm
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._stopping = stopping
        self._guards = guards
        self._stragglers = stragglers
        self._efficiency = efficiency
        self._trace = trace
        self._times = times
        self._is_usual = False  # whether the next step is not a first one
        self._waiting = WaitingForRound()
        self._identity = identity
        self._data_faults = DataFaults(comm=comm, say=recorder.say)
        self._finite = FiniteCheck(comm=comm, say=recorder.say)
        self._parent = resumed.parent
        self._position = resumed.position
        self._quality: dict[str, float] = {}  # of the newest evaluation
        self._quality_step: int | None = None

    def run(self) -> None:
        """Trains to the end. Collective.

        If the run has to stop early, saves the state and raises StoppedEarly.
        """
        with self._checkpoints, self._recorder:
            self._run()

    def _run(self) -> None:
        self._stopping.print_time_limit_changes()
        self._recorder.training_begins(self._position, micro_batches=self._guards.memory.num_parts)
        self._trace.after_step(self._position.step)
        self._recorder.clock.lap()
        while self._position.step < self._settings.total_steps:
            with self._loader.epoch(self._position.epoch, start=self._position.start) as batches:
                self._train_on(batches)
        with in_section(self._comm, Section.STEP):
            self._efficiency.ends(self._position.step)
            self._trace.ends()
        with in_section(self._comm, None):
            self._state.updater.end_round()
        self._save()  # before the evaluation, which runs user code that may fail
        self._checkpoints.finish()
        self._evaluate()
        if self._settings.checkpoint.keeps_best:
            self._save(again=True)  # now with its metrics, without which it cannot be the best
            self._checkpoints.finish()
        self._recorder.finished(self._quality)

    def totals(self) -> Totals:
        """Returns what this process has done so far. Not collective."""
        memory, divergence = self._guards.memory, self._guards.divergence
        totals = replace(
            self._recorder.totals(self._position, num_checkpoints=self._checkpoints.num_committed),
            micro_batches=memory.num_parts,
            out_of_memory=memory.num_shortages,
            roll_backs=divergence.num_roll_backs,
            lr_factor=divergence.lr_factor,
        )
        if self._stragglers is not None:
            totals = replace(totals, slow=self._stragglers.found)
        return replace(totals, efficiency=self._efficiency.total)

    # ------------------------------------------------------------------ one step

    def _train_on(self, batches: EpochIterator) -> None:
        """Trains to the end of the epoch or the run, or until the run is rolled back. Collective."""
        self._is_usual = False
        for batch in self._times.batches(self._agreed(batches)):
            self._recorder.clock.add("input", seconds=batches.last_wait_s)
            with in_section(self._comm, Section.STEP):
                goes_on = self._step(batch)
            if not goes_on or self._position.step == self._settings.total_steps:
                return
        with in_section(self._comm, Section.STEP):
            self._guards.balance.epoch_ended(self._position.epoch, step=self._position.step)
        self._position = self._position.next_epoch()

    def _agreed(self, batches: EpochIterator) -> Iterable[Batch]:
        """Yields the batches. Collective.

        If data are checked for damage, the ranks first add up how many samples each has skipped.
        """
        if self._loader.checker is None:
            yield from batches
            return
        clock = self._recorder.clock
        try:
            yield from agreed_batches(
                batches, comm=self._comm, waited=lambda seconds: clock.add("exposed_sync", seconds=seconds),
                counts_samples=self._runner.counts_samples,
            )  # fmt: skip
        except DataError as error:
            self._recorder.damage(self._position.step)
            if not error.agreed:
                raise
            self._save()
            self._checkpoints.finish()
            raise DataError(
                f"{error}\nThe state after step {self._position.step} is saved in "
                f"{self._settings.checkpoint.directory}: with the data restored the same command resumes from there",
                agreed=True,
            ) from error

    def _step(self, batch: Batch) -> bool:
        """Trains one step. Collective.

        Returns False if the run was rolled back instead; the caller must then ask for other batches.
        """
        recorder = self._recorder
        next_step = self._position.step + 1
        recorder.begins(next_step)
        lr = self._schedule.lr(self._position.step) * self._guards.divergence.lr_factor
        for group in self._state.optimizer.param_groups:
            set_lr(group, lr * group.get(LR_SCALE, 1.0))
        evaluates = self._waiting.evaluates_after(next_step, self._settings)
        num_saves = self._checkpoints.num_saves_until_stop(next_step)
        try:
            outcome = self._update(batch, votes=partial(self._votes, num_saves, evaluates=evaluates))
        except DivergedError as error:
            self._roll_back(batch, error)
            return False
        if outcome.agreed:
            self._times.agreed(outcome.sums, step=next_step)
        self._guards.balance.add(batch)
        self._position = self._position.after(batch)
        step = self._position.step
        stopping = outcome.agreed and self._stopping.agreed(outcome.sums)
        save = self._checkpoints.after_step(step, outcome.sums, agreed=outcome.agreed)
        save = self._waiting.saves_now(save, outcome) and self._guards.may_save
        evaluates = self._waiting.evaluates_now(evaluates, outcome)
        if evaluates and not stopping:
            started = time.perf_counter()
            with recorder.clock.span("evaluation"):  # before the save, which contains the metrics
                self._evaluate()
            self._stopping.plan.evaluations.add(time.perf_counter() - started)
        if save or stopping:
            self._save()
        seconds = recorder.ends(batch, outcome, position=self._position, lr=lr)
        self._stopping.plan.steps.add(seconds["step"] - seconds["checkpoint"] - seconds["evaluation"])
        self._times.step_ended(seconds, is_usual=self._is_usual)
        self._is_usual = not evaluates
        if self._stragglers is not None and not stopping:
            sums = outcome.sums if outcome.agreed else NO_COMPARISON
            self._stragglers.after_step(step, seconds, samples=batch.num_samples, sums=sums)
        self._efficiency.after_step(
            step, seconds, samples=batch.global_samples, window_ends=outcome.sums.get(WINDOW_ENDS, 0.0) > 0
        )
        self._trace.after_step(step)
        if stopping and step < self._settings.total_steps:
            self._leave_early()
        return True

    def _votes(self, num_saves: int, *, evaluates: bool) -> dict[str, float]:
        """Returns the numbers that this rank adds to the sums of a step, without those of the loss. Not collective."""
        votes = self._stopping.votes(num_saves=num_saves, evaluates=evaluates) | self._checkpoints.votes()
        votes |= self._times.votes()
        if self._stragglers is not None:
            votes |= self._stragglers.votes()
        return votes | self._guards.memory.votes()

    def _update(self, batch: Batch, *, votes: Callable[[], dict[str, float]]) -> StepOutcome:
        """Computes the gradients and updates the parameters. Collective.

        If a rank runs out of memory, the step is computed again in smaller micro-batches. Raises DivergedError on every
        rank if too many consecutive steps were dropped.

        votes: function that returns the numbers that this rank adds to the sums of the step.
        """
        updater, recorder, memory = self._state.updater, self._recorder, self._guards.memory
        step = self._position.step + 1
        while True:
            with recorder.clock.span("compute", what="forward and backward"), _named(f"step {step}"):
                loss = memory.attempt(
                    lambda parts: self._runner.forward_backward(batch, updater, micro_batches=parts)
                )
            if self._runner.device.type == "cuda":
                recorder.clock.add("device_compute", seconds=self._runner.device_s)
            for begin, end in self._runner.bubbles:
                recorder.clock.recount(begin, end, of="compute", to="bubble")
            weight = self._runner.weights.total
            of_loss = {} if weight is None else {LOSS_WEIGHT: 0.0 if memory.is_short else weight}
            local = updater.next_is_local
            sums = {"loss": loss, **of_loss, **(memory.votes(local=True) if local else votes())}
            divide_by = LOSS_WEIGHT if of_loss else None
            accepts = self._guards.accepts_alone if local else self._guards.accepts
            started = time.perf_counter()
            outcome = memory.update(partial(updater.step, sums=sums, accepts=accepts, divide_by=divide_by))
            if of_loss:
                outcome = replace(outcome, sums=with_mean_loss(outcome.sums))
            recorder.reduced(outcome, seconds=time.perf_counter() - started)
            if not outcome.agreed:
                return outcome
            if not memory.ran_out(outcome.sums):
                if not outcome.applied:
                    self._data_faults.after_dropped(step, batch)
                self._guards.after_update(step, outcome)
                if self._state.ema is not None and outcome.applied:
                    updater.wait_for_parameters()
                    self._state.ema.update()
                return outcome
            memory.divide(step)

    def _roll_back(self, batch: Batch, error: DivergedError) -> None:
        """Continues from an older checkpoint with a lower learning rate. Collective.

        Raises DivergedError if there is no such checkpoint, or after too many roll-backs.

        batch: the batch on which the run diverged.
        error: the error that ended the step.
        """
        self._checkpoints.finish()
        divergence = self._guards.divergence
        step, diverged = self._position.step + 1, self._position.after(batch)
        with in_section(self._comm, Section.LOAD):
            resumed = self._guards.roll_back()
        if resumed is None:
            faults = self._data_faults.describe(batch)
            text = str(error)
            if faults:
                text = (
                    f"{error.reason}: its data are not finite: {faults}. Repair these samples or leave them out; a "
                    "lower learning rate does not help"
                )
            raise DivergedError(f"{text} ({divergence.why_no_roll_back()})", agreed=True) from error
        self._parent = resumed.parent
        self._position = resumed.position
        if self._guards.skips_data:
            self._position = replace(self._position, epoch=diverged.epoch, start=diverged.start)
        self._recorder.rolled_back(
            resumed, step=step, why=error.reason,
            num_roll_backs=divergence.num_roll_backs, lr_factor=divergence.lr_factor,
        )  # fmt: skip
        self._save(again=True)  # with the lower rate and the count, which a restart must know

    # ------------------------------------------------------------------ at a boundary

    def _save(self, *, again: bool = False) -> None:
        self._checkpoints.save(self._position.step, capture=self._capture, again=again)

    def _capture(self) -> State:
        self._state.updater.wait_for_parameters()
        self._finite.before_save(self._state.model, step=self._position.step)
        state = self._state.capture(
            self._position, comm=self._comm, identity=self._identity, parent=self._parent
        )
        noted: dict[str, Any] = {"divergence": self._guards.divergence.state()}
        if (unit := self._runner.weights.unit) is not None:
            noted["loss_unit"] = unit
        state = replace(state, document={**state.document, **noted})
        return with_quality(state, quality=self._quality, step=self._quality_step)

    def _evaluate(self) -> None:
        if self._held_out is not None:
            with in_section(self._comm, None), _named(f"the evaluation after step {self._position.step}"):
                self._evaluate_on(self._held_out)

    def _evaluate_on(self, held_out: Loader) -> None:
        # Rank 0's buffers (running statistics) become those of all ranks: what is evaluated is what is saved.
        self._state.updater.wait_for_parameters()
        buffers = list(self._state.model.buffers())
        pipeline = pipeline_of(self._state.model)
        with_same = self._comm if pipeline is None else pipeline.replicas
        broadcast_tensors(with_same, buffers, root=0, name="the model's buffers")
        most = self._settings.evaluation_samples
        with self._state.updater.common_parameters():
            self._quality = evaluate(self._runner, held_out, comm=self._comm, max_samples=most)
        if self._state.ema is not None:
            with self._state.ema.applied():
                averaged = evaluate(self._runner, held_out, comm=self._comm, max_samples=most)
            self._quality |= {f"ema_{name}": value for name, value in averaged.items()}
        self._quality_step = self._position.step
        self._recorder.evaluated(self._quality, step=self._position.step)

    def _leave_early(self) -> None:
        self._efficiency.ends(self._position.step)
        self._trace.ends()
        self._checkpoints.finish()
        self._stopping.saved()
        verified = self._stopping.has_time_to_verify()
        if verified:
            self._verify()
        stopped = self._stopping.why()
        self._recorder.stopped(self._position, stopped=stopped, verified=verified)
        left = f", {in_words(stopped.time_left_s)} left" if stopped.time_left_s is not None else ""
        raise StoppedEarly(
            f"stopped after step {self._position.step} of {self._settings.total_steps} ({stopped.reason}{left}); the "
            f"state is saved{' and verified' if verified else ''} in {self._settings.checkpoint.directory}; run the "
            "same command again (with --resume auto) to resume",
            agreed=True,
        )

    def _verify(self) -> None:
        """Reads the saved checkpoint back. If it is damaged, saves once more, and reads that back. Collective."""
        try:
            self._checkpoints.verify_newest()
        except CheckpointError as error:
            self._recorder.say(f"{error}; saving again")
            self._save(again=True)
            self._checkpoints.finish()
            self._checkpoints.verify_newest()


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Puts `where` before the message of a UsageError that is raised in the `with` block."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{where}: {error}", agreed=error.agreed) from error
