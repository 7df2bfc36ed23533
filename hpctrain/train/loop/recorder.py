"""What a run reports: a record for each step, the progress line, and the totals at the end. Does not communicate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import final

from hpctrain.comm import Monitored
from hpctrain.data import Batch, Loader
from hpctrain.reduce import StepOutcome
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.train.loop.damage_log import DamageLog
from hpctrain.train.loop.progress import ProgressLine
from hpctrain.train.loop.settings import LoopSettings, Totals
from hpctrain.train.state.resumption import Resumed
from hpctrain.train.state.training_state import Position


@final
class RunRecorder:
    """Records one run on one rank.

    clock: the seconds of the current step by name; whatever takes time adds to it. world: whose messages about a rank
    that hangs name the step.
    """

    def __init__(
        self,
        records: RecordWriter,
        settings: LoopSettings,
        *,
        resumed: Resumed,
        loaders: Sequence[Loader | None],
        world: Monitored,
    ) -> None:
        self.records = records
        self.clock = StepClock()
        self.final_quality: Mapping[str, float] = {}
        self._world = world
        self._settings = settings
        self._resumed = resumed
        self._progress = ProgressLine(
            total_steps=settings.total_steps, every_s=settings.progress_every_s, silent=world.rank != 0,
            on_terminal=settings.on_terminal,
        )  # fmt: skip
        checkers = [loader.checker for loader in loaders if loader is not None]
        checked = any(checker is not None for checker in checkers)
        self._damage = DamageLog(records, rank=world.rank, checkers=checkers) if checked else None
        self._seconds: dict[str, float] = {}
        self._skipped = 0
        self._skipped_samples = 0
        self._samples = 0
        self._loss = float("nan")

    def say(self, text: str) -> None:
        """Prints a line for the user, on rank 0."""
        self._progress.say(text)

    def begins(self, step: int) -> None:
        """Step number `step`, counted from 1, begins."""
        self._world.step = step

    def reduced(self, batch: Batch, outcome: StepOutcome, *, seconds: float) -> None:
        """The updater has made its step, which took `seconds`."""
        self.clock.add("sync", seconds=outcome.sync_s)
        self.clock.add("exposed_sync", seconds=outcome.exposed_sync_s)
        self.clock.add("compute", seconds=seconds - outcome.exposed_sync_s)
        self._loss = outcome.sums["loss"]
        self._skipped += not outcome.applied
        self._skipped_samples += batch.global_skipped
        self._samples += batch.global_samples

    def ends(self, batch: Batch, outcome: StepOutcome, *, position: Position, lr: float) -> None:
        """The step that led to `position` has ended, with its save and evaluation."""
        seconds = self.clock.lap()
        for name in ("compute", "sync", "exposed_sync", "input", "checkpoint"):
            seconds.setdefault(name, 0.0)
        self._add(seconds)
        step = position.step
        if step % self._settings.metrics_every_steps == 0 or step == self._settings.total_steps:
            self.damage(step)
            self.records.write({
                "kind": "step", "time": time.time(), "step": step, "epoch": batch.epoch,
                "samples": batch.num_samples, "skipped_samples": batch.global_skipped,
                "global_samples": position.samples, "loss": self._loss, "lr": lr,
                "grad_norm": outcome.grad_norm, "loss_scale": outcome.loss_scale, "applied": outcome.applied,
                "seconds": seconds,
            })  # fmt: skip
        self._progress.step(
            step=step, epoch=batch.epoch, loss=self._loss, lr=lr, num_samples=batch.global_samples
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

    def stopped(self, position: Position, *, reason: str) -> None:
        self.records.write({
            "kind": "stopped", "time": time.time(), "reason": reason, **asdict(position),
        })  # fmt: skip

    def finished(self, quality: Mapping[str, float]) -> None:
        """The last evaluation is done, and the last save."""
        self.final_quality = quality
        self._add({"checkpoint": self.clock.lap().get("checkpoint", 0.0)})

    def totals(self, position: Position, *, num_checkpoints: int) -> Totals:
        """Returns what was done so far, by this process."""
        resumed = self._resumed
        return Totals(
            position=position,
            last_loss=self._loss,
            quality=dict(self.final_quality),
            seconds=self._seconds,
            steps=position.step - resumed.position.step,
            samples=self._samples,
            skipped_steps=self._skipped,
            skipped_samples=self._skipped_samples,
            checkpoints=num_checkpoints,
            resumed_from=str(resumed.path) if resumed.path is not None else None,
        )

    def _add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value
