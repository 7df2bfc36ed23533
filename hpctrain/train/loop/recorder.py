"""Writes the records of a run, one per step, and prints the run's progress line. Does not communicate."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

from hpctrain.comm import Monitored
from hpctrain.data import Batch, BlockChecker, Loader, sample_sum, show_sample_sum
from hpctrain.reduce import BackwardTimes, StepOutcome
from hpctrain.telemetry import EnergyMeter, RecordWriter, StepClock, tell
from hpctrain.train.loop.settings import LoopSettings, Totals
from hpctrain.train.loop.stopping import EndReason
from hpctrain.train.state.training_state import Position, Resumed

# Reports the damaged blocks that this rank's loaders have found: in its records, and the first ones on
# stdout.


_TOLD = 3


class DamageLog:
    """Writes one record for each damaged block of data that this rank has found. Does not communicate."""

    def __init__(self, records: RecordWriter, *, rank: int, checkers: Sequence[BlockChecker | None]) -> None:
        self._records = records
        self._rank = rank
        self._checkers = [checker for checker in checkers if checker is not None]
        self._written = [0] * len(self._checkers)

    def write(self, *, step: int) -> None:
        """Records the damaged blocks that were found since the last call, and prints the first few of the run.

        step: the step that the records name.
        """
        for place, checker in enumerate(self._checkers):
            for damage in checker.damages[self._written[place] :]:
                self._written[place] += 1
                self._records.write(
                    {"kind": "damage", "time": time.time(), "step": step, "dataset": str(checker.directory)}
                    | asdict(damage)
                )
                number = sum(self._written)
                if number <= _TOLD:
                    more = "; further ones only in the records" if number == _TOLD else ""
                    tell(f"rank {self._rank}: damaged data in {checker.directory}: {damage.describe()}{more}")


# Records the energy counters of this rank's node.


@final
class EnergyLog:
    """Writes the readings of an energy meter as records.

    joules: the sum of all readings in joules, by source.
    """

    def __init__(self, records: RecordWriter, meter: EnergyMeter) -> None:
        self._records = records
        self._meter = meter
        self.joules = dict.fromkeys(meter.sources, 0.0)

    def start(self) -> None:
        self._meter.start()

    def write(self, *, step: int) -> None:
        """Records the readings since the last call.

        step: the last step that has ended.
        """
        for record in self._meter.take():
            for source, joules in record["joules"].items():
                self.joules[source] += joules
            self._records.write({**record, "step": step})

    def close(self, *, step: int) -> None:
        """Records the last readings and closes the meter."""
        self._meter.close()
        self.write(step=step)


# Progress of training on rank 0: one line that is updated in place on a terminal, else separate lines.


class ProgressLine:
    """Prints step, loss, samples/s and remaining time on rank 0.

    Args:
        every_s: The seconds between lines.
        silent: True on all ranks except rank 0: nothing is printed.
        on_terminal: True if the user sees the output on a terminal, where the line is updated in place.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        every_s: float,
        silent: bool,
        on_terminal: bool = False,
    ) -> None:
        self._total_steps = total_steps
        self._silent = silent
        # isatty alone is not enough: mpirun gives rank 0 a pseudo-terminal even if its own output is a file. Only
        # `hpctrain launch`, or a rank without a launcher, can find out; hence the parameter.
        self._on_terminal = on_terminal and sys.stdout.isatty()
        self._every_s = min(every_s, 0.5) if self._on_terminal else every_s
        self._last_told = -float("inf")
        self._width = 0
        # (time, step, samples so far) of the last steps, for the current rate instead of the average
        self._history: deque[tuple[float, int, int]] = deque(maxlen=200)

    def step(self, *, step: int, epoch: int, loss: float, lr: float, num_samples: int) -> None:
        """Reports a step.

        step: the number of steps that are done.
        num_samples: the number of samples of this step over all ranks.
        """
        if self._silent:
            return
        now = time.monotonic()
        samples = self._history[-1][2] if self._history else 0
        self._history.append((now, step, samples + num_samples))
        if now - self._last_told < self._every_s and step < self._total_steps:
            return
        self._last_told = now
        line = (
            f"step {step}/{self._total_steps}  epoch {epoch}  loss {loss:.4f}  lr {lr:.3g}{self._rates(step)}"
        )
        if self._on_terminal:
            tell("\r" + line.ljust(self._width), end="")
            self._width = len(line)
        else:
            tell(line)

    def say(self, text: str) -> None:
        """Prints a line that stays above the progress line."""
        if self._silent:
            return
        if self._on_terminal and self._width:
            tell("\r" + " " * self._width + "\r", end="")
            self._width = 0
        tell(text)

    def _rates(self, step: int) -> str:
        (t0, s0, n0), (t1, s1, n1) = self._history[0], self._history[-1]
        if t1 <= t0 or s1 <= s0:
            return ""
        left_s = (self._total_steps - step) * (t1 - t0) / (s1 - s0)
        return f"  {(n1 - n0) / (t1 - t0):,.0f} samples/s  {_duration(left_s)} left"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


# What a run reports.


# Steps between two records of the buckets' mean times.
BUCKETS_EVERY_STEPS = 100


@final
class RunRecorder:
    """Records a run on one rank. A context manager: inside the `with` block the energy meter is read.

    Args:
        world: The communicator. Its messages about a rank that hangs name the current step, which this recorder sets.
        counts_samples: False on a rank whose samples another rank counts; the rank's own records then count 0 samples.
        meter: The energy meter of this node; None on ranks that do not read it.
        advice: A function that returns new records of advice on the number of nodes; None on all ranks except rank 0.

    Attributes:
        clock: The clock of the current step, to which all parts of the run add the seconds that they take, by name.
    """

    def __init__(
        self,
        records: RecordWriter,
        settings: LoopSettings,
        *,
        resumed: Resumed,
        loaders: Sequence[Loader | None],
        world: Monitored,
        meter: EnergyMeter | None = None,
        counts_samples: bool = True,
        advice: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        self.records = records
        self._advice = advice
        self.clock = StepClock()
        self.final_quality: Mapping[str, float] = {}
        self._stopped: EndReason | None = None
        self._world = world
        self._counts_samples = counts_samples
        self._settings = settings
        self._resumed = resumed
        self._progress = ProgressLine(
            total_steps=settings.total_steps, every_s=settings.progress_every_s, silent=world.rank != 0,
            on_terminal=settings.on_terminal,
        )  # fmt: skip
        checkers = [loader.checker for loader in loaders if loader is not None]
        checked = any(checker is not None for checker in checkers)
        self._damage = DamageLog(records, rank=world.rank, checkers=checkers) if checked else None
        self._energy = EnergyLog(records, meter) if meter is not None else None
        self._step = resumed.position.step
        self._seconds: dict[str, float] = {}
        self._steps = 0
        self._bucket_times = _BucketTimes()
        self._skipped = 0
        self._skipped_samples = 0
        self._samples = 0
        self._loss = float("nan")

    def __enter__(self) -> RunRecorder:
        if self._energy is not None:
            self._energy.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._energy is not None:
            self._energy.close(step=self._step)

    def say(self, text: str) -> None:
        """Prints a line for the user, on rank 0."""
        self._progress.say(text)

    def training_begins(self, position: Position, *, micro_batches: int) -> None:
        """Reports to the receivers of metrics (sinks, such as an MLflow server) that training begins at `position`."""
        self.records.observe({
            "kind": "begins", "time": time.time(), "step": position.step, "samples": position.samples,
            "total_steps": self._settings.total_steps, "micro_batches": micro_batches,
        })  # fmt: skip

    def begins(self, step: int) -> None:
        """Announces the step that is about to run, counted from 1."""
        self._world.step = step

    def reduced(self, outcome: StepOutcome, *, seconds: float) -> None:
        """Records the times of a call of the updater's `step`, whether the step was applied or skipped.

        seconds: the duration of the call: the reduction and the optimizer's step.
        """
        now = time.perf_counter()
        sync_ended = now - outcome.update_s
        self.clock.add("sync", seconds=outcome.sync_s)
        self.clock.add("hidden_sync", seconds=outcome.hidden_sync_s)
        self.clock.add(
            "exposed_sync", seconds=outcome.exposed_sync_s, ended=sync_ended, what="wait for reduction"
        )
        before_s = seconds - outcome.exposed_sync_s - outcome.update_s
        self.clock.add(
            "compute", seconds=before_s, ended=sync_ended - outcome.exposed_sync_s, what="last gradients"
        )
        self.clock.add("compute", seconds=outcome.update_s, ended=now, what="optimizer")
        self.clock.sync_ended(sync_ended)

    def ends(
        self, batch: Batch, outcome: StepOutcome, *, position: Position, lr: float
    ) -> Mapping[str, float]:
        """Records a step, after the save and evaluation that follow it.

        Returns the seconds that the parts of the step took, by name.

        position: the position after the step.
        """
        self._loss = outcome.sums["loss"]
        self._steps += 1
        self._bucket_times.add(outcome.times)
        self._skipped += not outcome.applied
        self._skipped_samples += batch.global_skipped
        self._samples += batch.global_samples
        seconds = self.clock.lap()
        self._add(seconds)
        step = self._step = position.step
        if self._energy is not None:
            self._energy.write(step=step)
        for found in () if self._advice is None else self._advice():
            self.records.write(found)
        record = {
            "kind": "step", "time": time.time(), "step": step, "epoch": batch.epoch,
            "samples": batch.num_samples if self._counts_samples else 0, "skipped_samples": batch.global_skipped,
            "global_samples": position.samples, "loss": self._loss, "lr": lr,
            "grad_norm": outcome.grad_norm, "loss_scale": outcome.loss_scale, "applied": outcome.applied,
            "seconds": seconds,
        }  # fmt: skip
        if step % self._settings.metrics_every_steps == 0 or step == self._settings.total_steps:
            self.damage(step)
            self.records.write(record | self._sample_sum(batch))
            due = 1 if step == self._settings.total_steps else BUCKETS_EVERY_STEPS
            if self._bucket_times.num_steps >= due:
                self.records.write(
                    {"kind": "buckets", "time": time.time(), "step": step, **self._bucket_times.take()}
                )
        else:
            self.records.observe(record)
        self._progress.step(
            step=step, epoch=batch.epoch, loss=self._loss, lr=lr, num_samples=batch.global_samples
        )
        return seconds

    def _sample_sum(self, batch: Batch) -> dict[str, str]:
        if not self._settings.sample_sums or batch.indices is None:
            return {}
        counted = batch.indices[: batch.num_samples if self._counts_samples else 0]
        return {"sample_sum": show_sample_sum(sample_sum(counted))}

    def rolled_back(
        self, resumed: Resumed, *, step: int, why: str, num_roll_backs: int, lr_factor: float
    ) -> None:
        """Records that the run was rolled back during `step`, which has no other record."""
        self._add(self.clock.lap())
        self.records.write({
            "kind": "roll_back", "time": time.time(), "step": step, "to_step": resumed.position.step,
            "to_samples": resumed.position.samples, "reason": why, "number": num_roll_backs, "lr_factor": lr_factor,
        })  # fmt: skip
        self.say(
            f"step {step}: {why}: rolled back to step {resumed.position.step} ({resumed.path}); roll-back "
            f"{num_roll_backs}, the learning rate is {lr_factor:g} times the recipe's from now on"
        )

    def evaluated(self, quality: Mapping[str, float], *, step: int) -> None:
        self.records.write({
            "kind": "evaluation", "time": time.time(), "step": step, "quality": dict(quality),
        })  # fmt: skip
        self.damage(step)
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in quality.items())
        self.say(f"held out, step {step}: {metrics}")

    def damage(self, step: int) -> None:
        """Records the damaged blocks of data found since the last call."""
        if self._damage is not None:
            self._damage.write(step=step)

    def stopped(self, position: Position, *, stopped: EndReason, verified: bool) -> None:
        self._stopped = stopped
        self.records.write({
            "kind": "stopped", "time": time.time(), "reason": stopped.reason, "time_left_s": stopped.time_left_s,
            "verified": verified, **asdict(position),
        })  # fmt: skip

    def finished(self, quality: Mapping[str, float]) -> None:
        """Records the end of the run, after the last evaluation and save.

        quality: the metrics of the last evaluation by name.
        """
        self.final_quality = quality
        self._add({"checkpoint": self.clock.lap().get("checkpoint", 0.0)})

    def totals(self, position: Position, *, num_checkpoints: int) -> Totals:
        """Returns what this process has done so far."""
        resumed = self._resumed
        return Totals(
            position=position,
            last_loss=self._loss,
            quality=dict(self.final_quality),
            seconds=self._seconds,
            steps=self._steps,
            samples=self._samples,
            skipped_steps=self._skipped,
            skipped_samples=self._skipped_samples,
            checkpoints=num_checkpoints,
            resumed_from=str(resumed.path) if resumed.path is not None else None,
            stopped_by=self._stopped.reason if self._stopped is not None else None,
            time_left_s=self._stopped.time_left_s if self._stopped is not None else None,
            energy_j=self._energy.joules if self._energy is not None else None,
        )

    def _add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value


@final
class _BucketTimes:
    """Averages the times of backward, update and bucket readiness over steps with the same gradient buckets.

    A step with other buckets starts a new average.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._sums: list[float] = []
        self._steps = 0

    @property
    def num_steps(self) -> int:
        return self._steps

    def add(self, times: BackwardTimes | None) -> None:
        if times is None:
            return
        if times.bucket_bytes != self._sizes:
            self._sizes, self._sums, self._steps = times.bucket_bytes, [0.0] * (2 + len(times.ready_s)), 0
        values = (times.backward_s, times.update_s, *times.ready_s)
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]
        self._steps += 1

    def take(self) -> dict[str, Any]:
        """Returns the means as fields of a record and starts a new average. At least one step must have been added."""
        means = [total / self._steps for total in self._sums]
        found = {
            "steps": self._steps, "backward_s": means[0], "update_s": means[1], "bytes": list(self._sizes),
            "ready_s": means[2:],
        }  # fmt: skip
        self._sizes, self._sums, self._steps = (), [], 0
        return found
