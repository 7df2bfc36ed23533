"""The training loop: the flow of a run on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import torch

from hpctrain.checkpoint import State
from hpctrain.checkpoint.saving.save_requests import SaveRequests
from hpctrain.checkpoint.saving.saver import Begin
from hpctrain.comm import Collective, broadcast_tensors
from hpctrain.data import Batch, Batches, Loader
from hpctrain.errors import DataError, StoppedEarly
from hpctrain.reduce import StepOutcome
from hpctrain.resilience import StopRequest
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.train.agreed_batches import agreed_batches
from hpctrain.train.checkpointing import Checkpointing, with_quality
from hpctrain.train.damage_log import DamageLog
from hpctrain.train.evaluate import evaluate
from hpctrain.train.progress import ProgressLine
from hpctrain.train.resumption import Resumed
from hpctrain.train.schedule import Schedule
from hpctrain.train.settings import LoopSettings, Totals
from hpctrain.train.state import Position, TrainingState
from hpctrain.train.sync_batch_norm import communicates_in_forward
from hpctrain.train.task import Task, takes_valid


class Training:
    """Trains `task` until the last step, or until any rank is asked to stop. Every method is collective."""

    def __init__(
        self,
        task: Task,
        *,
        state: TrainingState,
        loader: Loader,
        held_out: Loader | None,
        schedule: Schedule,
        settings: LoopSettings,
        comm: Collective,
        device: torch.device,
        dtype: torch.dtype,
        autocast: Callable[[], AbstractContextManager[object]],
        identity: Mapping[str, Any],
        resumed: Resumed,
        records: RecordWriter,
        stop: StopRequest,
        requests: SaveRequests,
        begin_save: Begin | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._task = task
        self._takes_valid = takes_valid(task)
        self._state = state
        self._loader = loader
        self._held_out = held_out
        self._schedule = schedule
        self._settings = settings
        self._comm = comm
        self._device = device
        self._dtype = dtype  # of the model: floating-point fields are handed to the task in it
        self._autocast = autocast
        self._identity = identity
        self._records = records
        self._stop = stop
        self._on_step = on_step
        self._clock = StepClock()
        self._progress = ProgressLine(
            total_steps=settings.total_steps, every_s=settings.progress_every_s, silent=comm.rank != 0,
            on_terminal=settings.on_terminal,
        )  # fmt: skip
        self._position = resumed.position
        self._first_step = resumed.position.step
        self._resumed_from = str(resumed.path) if resumed.path is not None else None
        self._parent = resumed.parent
        self._checkpoints = Checkpointing(
            settings.checkpoint, comm=comm, records=records, say=self._progress.say, clock=self._clock,
            requests=requests, begin=begin_save,
            saved_step=resumed.position.step if resumed.path is not None else None,
        )  # fmt: skip
        self._quality: dict[str, float] = {}  # of the newest evaluation
        self._quality_step: int | None = None
        self._final_quality: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._skipped = 0
        self._skipped_samples = 0
        self._samples = 0
        self._loss = float("nan")
        self._damage_log = DamageLog(
            records, rank=comm.rank,
            checkers=[made.checker for made in (loader, held_out) if made is not None],
        )  # fmt: skip

    def run(self) -> None:
        """Train to the end. Raises StoppedEarly, with the state saved, when a rank was asked to stop."""
        with self._checkpoints:
            self._run()

    def _run(self) -> None:
        self._clock.lap()
        while self._position.step < self._settings.total_steps:
            with self._loader.epoch(self._position.epoch, start=self._position.start) as batches:
                self._train_on(batches)
        self._save()  # before the evaluation, which runs the user's code once more
        self._checkpoints.finish()
        self._evaluate()
        self._final_quality = self._quality
        if self._settings.checkpoint.keeps_best:
            self._save(again=True)  # now with its quality, or it could not be the best
            self._checkpoints.finish()
        self._add_seconds({"checkpoint": self._clock.lap().get("checkpoint", 0.0)})

    def totals(self) -> Totals:
        """What was done so far, by this process. Not collective."""
        return Totals(
            position=self._position,
            last_loss=self._loss,
            quality=self._final_quality,
            seconds=self._seconds,
            steps=self._position.step - self._first_step,
            samples=self._samples,
            skipped_steps=self._skipped,
            skipped_samples=self._skipped_samples,
            checkpoints=self._checkpoints.num_committed,
            resumed_from=self._resumed_from,
        )

    # ------------------------------------------------------------------ one step

    def _train_on(self, batches: Batches) -> None:
        """To the end of the epoch, or of the run."""
        waited_s = self._loader.wait_s
        for batch in self._agreed(batches):
            self._clock.add("input", seconds=self._loader.wait_s - waited_s)
            waited_s = self._loader.wait_s
            self._step(batch)
            if self._position.step == self._settings.total_steps:
                return
        self._position = replace(self._position, epoch=self._position.epoch + 1, start=0)

    def _agreed(self, batches: Batches) -> Iterable[Batch]:
        """Where damage is looked for, the ranks tell each other what they found before they compute."""
        if self._loader.checker is None:
            yield from batches
            return
        try:
            yield from agreed_batches(
                batches,
                comm=self._comm,
                waited=lambda seconds: self._clock.add("exposed_sync", seconds=seconds),
            )
        except DataError as error:
            self._damage_log.write(step=self._position.step)
            if not error.agreed:
                raise
            self._save()
            self._checkpoints.finish()
            raise DataError(
                f"{error}\nThe state after step {self._position.step} is saved in "
                f"{self._settings.checkpoint.directory}: with the data restored the same command goes on from there",
                agreed=True,
            ) from error

    def _step(self, batch: Batch) -> None:
        self._on_step(self._position.step + 1)
        lr = self._schedule.lr(self._position.step)
        for group in self._state.optimizer.param_groups:
            group["lr"] = lr
        with self._clock.span("compute"):
            loss = self._forward_backward(batch)
        started = time.perf_counter()
        outcome = self._state.updater.step(
            sums={"loss": loss, "stop": float(self._stop.requested), **self._checkpoints.votes()}
        )
        self._clock.add("sync", seconds=outcome.sync_s)
        self._clock.add("exposed_sync", seconds=outcome.exposed_sync_s)
        self._clock.add("compute", seconds=time.perf_counter() - started - outcome.exposed_sync_s)
        self._loss = outcome.sums["loss"]
        self._skipped += not outcome.applied
        self._skipped_samples += batch.global_skipped
        self._samples += batch.global_samples
        self._position = Position(
            step=self._position.step + 1,
            epoch=batch.epoch,
            start=batch.start + batch.global_samples,
            samples=self._position.samples + batch.global_samples,
        )
        step = self._position.step
        stopping = outcome.sums["stop"] > 0
        save = self._checkpoints.after_step(step, outcome.sums)
        every = self._settings.evaluate_every_steps
        if every and step % every == 0 and step < self._settings.total_steps and not stopping:
            with self._clock.outside():  # before the save, which holds what comes out
                self._evaluate()
        if save or stopping:
            self._save()
        self._record(batch, outcome, lr=lr)
        if stopping and step < self._settings.total_steps:
            self._leave_early()

    def _forward_backward(self, batch: Batch) -> float:
        """Gradients of this rank's share; returns its weighted loss, which adds up to the batch's mean."""
        losses = []
        # Where forward is collective, a rank without samples takes part with an empty batch of weight 0.
        together = communicates_in_forward(self._state.model)
        parts = [p for p in batch.split(self._settings.micro_batches) if p.num_samples > 0 or together]
        for number, part in enumerate(parts, start=1):
            with self._autocast():
                loss = self._loss_of(part.to(self._device, dtype=self._dtype))
            self._state.updater.backward(loss, weight=part.weight, last=number == len(parts))
            if part.num_samples > 0:  # the mean over no samples is NaN
                losses.append(loss.detach().double() * part.weight)
        return float(torch.stack(losses).sum()) if losses else 0.0  # one wait for the device

    def _loss_of(self, part: Batch) -> torch.Tensor:
        """Mean loss over the samples that count: a task that takes `valid` leaves the others out by itself."""
        if self._takes_valid:
            return self._task.loss(self._state.model, part.fields, valid=part.valid)  # type: ignore[call-arg]
        return self._task.loss(self._state.model, part.real().fields)

    def _record(self, batch: Batch, outcome: StepOutcome, *, lr: float) -> None:
        seconds = self._clock.lap()
        for name in ("compute", "sync", "exposed_sync", "input", "checkpoint"):
            seconds.setdefault(name, 0.0)
        self._add_seconds(seconds)
        step = self._position.step
        if step % self._settings.metrics_every_steps == 0 or step == self._settings.total_steps:
            self._damage_log.write(step=step)
            self._records.write({
                "kind": "step", "time": time.time(), "step": step, "epoch": batch.epoch,
                "samples": batch.num_samples, "skipped_samples": batch.global_skipped,
                "global_samples": self._position.samples, "loss": self._loss, "lr": lr,
                "grad_norm": outcome.grad_norm, "loss_scale": outcome.loss_scale, "applied": outcome.applied,
                "seconds": seconds,
            })  # fmt: skip
        self._progress.step(
            step=step, epoch=batch.epoch, loss=self._loss, lr=lr, num_samples=batch.global_samples
        )

    def _add_seconds(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value

    # ------------------------------------------------------------------ at a boundary

    def _save(self, *, again: bool = False) -> None:
        self._checkpoints.save(self._position.step, capture=self._capture, again=again)

    def _capture(self) -> State:
        state = self._state.capture(
            self._position, comm=self._comm, identity=self._identity, parent=self._parent
        )
        return with_quality(state, quality=self._quality, step=self._quality_step)

    def _evaluate(self) -> None:
        if self._held_out is None:
            return
        self._align_buffers()
        quality = evaluate(
            self._task, self._state.model, self._held_out, comm=self._comm, device=self._device, dtype=self._dtype,
            autocast=self._autocast, max_samples=self._settings.evaluation_samples,
        )  # fmt: skip
        step = self._position.step
        self._quality, self._quality_step = quality, step
        self._records.write({"kind": "evaluation", "time": time.time(), "step": step, "quality": quality})
        self._damage_log.write(step=step)
        told = "  ".join(f"{name} {value:.4f}" for name, value in quality.items())
        self._progress.say(f"held out, step {step}: {told}")

    def _align_buffers(self) -> None:
        """Rank 0's buffers (running statistics) become everybody's: the ones that are saved are evaluated."""
        buffers = list(self._state.model.buffers())
        broadcast_tensors(self._comm, buffers, root=0, name="the model's buffers")

    def _leave_early(self) -> None:
        self._checkpoints.finish()
        directory = self._settings.checkpoint.directory
        reason = self._stop.signal_name or "another rank was asked to"
        self._records.write(
            {"kind": "stopped", "time": time.time(), "reason": reason, **asdict(self._position)}
        )
        raise StoppedEarly(
            f"stopped after step {self._position.step} of {self._settings.total_steps} ({reason}); the state is "
            f"saved in {directory}; run the same command again (with --resume auto) to go on",
            agreed=True,
        )
