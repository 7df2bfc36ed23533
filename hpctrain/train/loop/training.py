"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, final

from hpctrain.checkpoint import State
from hpctrain.comm import Collective, broadcast_tensors
from hpctrain.data import Batch, Batches, Loader
from hpctrain.errors import DataError, StoppedEarly
from hpctrain.resilience import StopRequest
from hpctrain.train.loop.agreed_batches import agreed_batches
from hpctrain.train.loop.checkpointing import Checkpointing, with_quality
from hpctrain.train.loop.evaluate import evaluate
from hpctrain.train.loop.recorder import RunRecorder
from hpctrain.train.loop.settings import LoopSettings, Totals
from hpctrain.train.state.resumption import Resumed
from hpctrain.train.state.training_state import TrainingState
from hpctrain.train.task.schedule import LR_SCALE, Schedule
from hpctrain.train.task.task_runner import TaskRunner


@final
class Training:
    """Trains until the last step, or until any rank is asked to stop. Every method is collective but `totals`.

    state: what is trained and saved; `runner` computes with its model. identity: what a position in the data belongs
    to. resumed: where to begin.
    """

    def __init__(
        self,
        runner: TaskRunner,
        *,
        state: TrainingState,
        loader: Loader,
        held_out: Loader | None,
        schedule: Schedule,
        settings: LoopSettings,
        comm: Collective,
        checkpoints: Checkpointing,
        recorder: RunRecorder,
        stop: StopRequest,
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
        self._stop = stop
        self._identity = identity
        self._parent = resumed.parent
        self._position = resumed.position
        self._quality: dict[str, float] = {}  # of the newest evaluation
        self._quality_step: int | None = None

    def run(self) -> None:
        """Trains to the end. Raises StoppedEarly, with the state saved, if a rank was asked to stop. Collective."""
        with self._checkpoints:
            self._run()

    def _run(self) -> None:
        self._recorder.clock.lap()
        while self._position.step < self._settings.total_steps:
            with self._loader.epoch(self._position.epoch, start=self._position.start) as batches:
                self._train_on(batches)
        self._save()  # before the evaluation, which runs user code that may fail
        self._checkpoints.finish()
        self._evaluate()
        if self._settings.checkpoint.keeps_best:
            self._save(again=True)  # now with its metrics, without which it cannot be the best
            self._checkpoints.finish()
        self._recorder.finished(self._quality)

    def totals(self) -> Totals:
        """Returns what this process has done so far. Not collective."""
        return self._recorder.totals(self._position, num_checkpoints=self._checkpoints.num_committed)

    # ------------------------------------------------------------------ one step

    def _train_on(self, batches: Batches) -> None:
        """Trains to the end of the epoch or of the run. Collective."""
        waited_s = self._loader.wait_s
        for batch in self._agreed(batches):
            self._recorder.clock.add("input", seconds=self._loader.wait_s - waited_s)
            waited_s = self._loader.wait_s
            self._step(batch)
            if self._position.step == self._settings.total_steps:
                return
        self._position = self._position.next_epoch()

    def _agreed(self, batches: Batches) -> Iterable[Batch]:
        """If data are checked for damage, the ranks exchange what they found before they compute. Collective."""
        if self._loader.checker is None:
            yield from batches
            return
        clock = self._recorder.clock
        try:
            yield from agreed_batches(
                batches, comm=self._comm, waited=lambda seconds: clock.add("exposed_sync", seconds=seconds)
            )
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

    def _step(self, batch: Batch) -> None:
        state, recorder = self._state, self._recorder
        recorder.begins(self._position.step + 1)
        lr = self._schedule.lr(self._position.step)
        for group in state.optimizer.param_groups:
            group["lr"] = lr * group.get(LR_SCALE, 1.0)
        with recorder.clock.span("compute"):
            loss = self._runner.forward_backward(
                batch, state.updater, micro_batches=self._settings.micro_batches
            )
        started = time.perf_counter()
        outcome = state.updater.step(
            sums={"loss": loss, "stop": float(self._stop.requested), **self._checkpoints.votes()}
        )
        recorder.reduced(batch, outcome, seconds=time.perf_counter() - started)
        self._position = self._position.after(batch)
        step = self._position.step
        stopping = outcome.sums["stop"] > 0
        save = self._checkpoints.after_step(step, outcome.sums)
        every = self._settings.evaluate_every_steps
        if every and step % every == 0 and step < self._settings.total_steps and not stopping:
            with recorder.clock.outside():  # before the save, which contains the metrics
                self._evaluate()
        if save or stopping:
            self._save()
        recorder.ends(batch, outcome, position=self._position, lr=lr)
        if stopping and step < self._settings.total_steps:
            self._leave_early()

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
        # Rank 0's buffers (running statistics) become those of all ranks: what is evaluated is what is saved.
        buffers = list(self._state.model.buffers())
        broadcast_tensors(self._comm, buffers, root=0, name="the model's buffers")
        self._quality = evaluate(
            self._runner, self._held_out, comm=self._comm, max_samples=self._settings.evaluation_samples
        )
        self._quality_step = self._position.step
        self._recorder.evaluated(self._quality, step=self._position.step)

    def _leave_early(self) -> None:
        self._checkpoints.finish()
        directory = self._settings.checkpoint.directory
        reason = self._stop.signal_name or "another rank was asked to"
        self._recorder.stopped(self._position, reason=reason)
        raise StoppedEarly(
            f"stopped after step {self._position.step} of {self._settings.total_steps} ({reason}); the state is "
            f"saved in {directory}; run the same command again (with --resume auto) to resume",
            agreed=True,
        )
