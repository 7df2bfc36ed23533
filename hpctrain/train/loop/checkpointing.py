"""Decides when the training state is saved, saves the state, and records and prints what the save cost."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import final

from hpctrain.checkpoint import (
    CheckpointRequests,
    CheckpointSave,
    Costs,
    IntervalAdvice,
    Saver,
    SaveResult,
    State,
    saving_into,
    verify,
)
from hpctrain.comm import Collective, Section, in_section
from hpctrain.errors import CheckpointError
from hpctrain.resilience import RecentTimes
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.train.loop.settings import CheckpointPolicy


def with_quality(state: State, *, quality: Mapping[str, float], step: int | None) -> State:
    """Returns `state` with the metrics of the newest evaluation in its document.

    The best checkpoint is chosen by these metrics. NaN and infinities are left out, since JSON cannot represent them. A
    checkpoint without the metric is never the best.

    quality: the metrics by name.
    step: the step after which the evaluation was made.
    """
    finite = {name: value for name, value in quality.items() if math.isfinite(value)}
    if not finite:
        return state
    return replace(state, document={**state.document, "quality": finite, "quality_step": step})


@final
class Checkpointing:
    """Saves the checkpoints of a run. A context manager: on exit, the save in flight is completed.

    The save is also completed after an agreed error, which is an error that all ranks raise. The ranks decide together
    through the sums of a step: each rank contributes `votes`, and `after_step` reads the sums.

    Args:
        policy: When and where to save.
        say: A function that prints a line for the user, on rank 0.
        clock: The clock to which two times are added: the time for which a save blocks training, and as `own_write` the
            time in which this rank wrote its part of a committed checkpoint.
        requests: The user's requests to save now.
        saved_step: The step whose state is already on disk; None if no state is on disk.
        begin: A function that starts a save, as `Saver` takes it; None: saves go into the policy's directory.

    Attributes:
        times: The seconds that the newest saves took until they were committed.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        *,
        comm: Collective,
        records: RecordWriter,
        say: Callable[[str], None],
        clock: StepClock,
        requests: CheckpointRequests,
        saved_step: int | None = None,
        begin: Callable[..., CheckpointSave] | None = None,
    ) -> None:
        self._policy = policy
        self._comm = comm
        self._records = records
        self._say = say
        self._clock = clock
        self._requests = requests
        self._saved_step = saved_step
        self._last_save_s = time.monotonic()
        self._costs = Costs()
        self._noted: set[str] = set()  # notes that have been printed; each is printed once
        self.num_committed = 0
        self.times = RecentTimes(20)
        self._newest: Path | None = None  # the checkpoint that this run has committed last
        self._saver = Saver(
            begin or saving_into(policy.directory, comm=comm, options=policy.options),
            comm=comm,
            mode=policy.mode,
            when_busy=policy.when_busy,
            on_saved=self._tell,
        )

    # ------------------------------------------------------------------ in the loop

    def votes(self) -> dict[str, float]:
        """Returns the numbers that this rank adds to the sums of a step, by name. Not collective.

        The names are the same on every rank.
        """
        by_time = (
            self._comm.rank == 0
            and not self._saver.would_skip
            and self._policy.due_by_time(time.monotonic() - self._last_save_s, advice=self._advice())
        )
        votes = {"save": float(by_time), "save_asked": float(self._requests.asked())}
        if self._saver.in_flight_step is not None:
            votes["saved"] = float(self._saver.ready())
        return votes

    def after_step(self, step: int, sums: Mapping[str, float], *, agreed: bool = True) -> bool:
        """Advances the save in flight. Returns True if a checkpoint is due after `step`. Collective.

        Raises the error of a background save on every rank.

        sums: the votes, summed over the ranks.
        agreed: False after a local step of a schedule, which has no votes.
        """
        if not agreed:
            return self._policy.due_by_step(step)
        if sums.get("saved", 0.0) == self._comm.num_ranks:
            with self._saving():
                self._saver.advance()
        if sums["save_asked"] > 0:
            self._requests.taken()
            return True
        if not self._policy.due_by_step(step):
            return sums["save"] > 0
        if self._saver.would_skip:
            self._records.write({
                "kind": "checkpoint_skipped", "time": time.time(), "step": step,
                "in_flight": self._saver.in_flight_step,
            })  # fmt: skip
            return False
        return True

    def num_saves_until_stop(self, step: int) -> int:
        """Returns the number of saves for which the run must wait if it stops one step after `step`."""
        return 1 + (self._saver.in_flight_step is not None) + self._policy.due_by_step(step)

    def save(self, step: int, *, capture: Callable[[], State], again: bool = False) -> None:
        """Saves the state that `capture` returns; a background save is only started. Collective.

        Does nothing if the state of this step is already saved or being saved, unless `again` is True. Waits for an
        earlier save in flight first.
        """
        if self._saved_step == step and not again:
            return
        with self._saving():
            if self._saver.would_skip:
                self._saver.finish()  # this save was requested, or is the last: it is not skipped
            self._records.observe({"kind": "checkpoint_begun", "time": time.time(), "step": step})
            self._saver.save(capture(), step=step)
        self._saved_step = step
        self._last_save_s = time.monotonic()

    def finish(self) -> None:
        """Waits until the save in flight has ended. Collective."""
        with self._saving():
            self._saver.finish()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        with self._clock.span("checkpoint"), in_section(self._comm, Section.SAVE):
            try:
                yield
            except CheckpointError as error:
                self._records.write({"kind": "checkpoint_failed", "time": time.time(), "error": str(error)})
                raise

    def verify_newest(self) -> None:
        """Reads the newest checkpoint back. Raises CheckpointError on every rank if the file is damaged. Collective."""
        if self._newest is None:
            return
        with in_section(self._comm, Section.LOAD):
            damage = [line for found in verify(self._newest, comm=self._comm) for line in found.damage]
        self._records.write({
            "kind": "checkpoint_verified", "time": time.time(), "path": str(self._newest), "good": not damage,
        })  # fmt: skip
        if damage:
            raise CheckpointError(
                f"checkpoint {self._newest} was saved and reads back damaged: {'; '.join(damage[:3])}",
                agreed=True,
            )

    def __enter__(self) -> Checkpointing:
        self._last_save_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with in_section(self._comm, Section.SAVE):
            self._saver.__exit__(kind, error, where)

    # ------------------------------------------------------------------ when one is committed

    def _advice(self) -> IntervalAdvice | None:
        if self._policy.failures_per_day is None:
            return None
        return self._costs.advice(failures_per_day=self._policy.failures_per_day)

    def _tell(self, result: SaveResult) -> None:
        self.num_committed += 1
        self._newest = result.path
        self.times.add(result.seconds)
        self._clock.add("own_write", seconds=result.own_write_s)
        self._costs.add(stall_s=result.stall_s, write_s=result.seconds)
        advice = self._advice()
        if self.num_committed == 1:
            note = f" ({result.note})" if result.note else ""
            self._say(f"checkpoints: {result.engine.value}{note}, in {self._policy.directory}")
            if advice is not None:
                self._say(f"checkpoints: {advice.describe()}")
        news = [note for note in result.note.split("; ") if _but_for_numbers(note) not in self._noted]
        self._noted |= {_but_for_numbers(note) for note in news}
        if news and self.num_committed > 1:
            self._say(f"checkpoint of step {result.step}: {'; '.join(news)}")
        self._records.write({
            "kind": "checkpoint", "time": time.time(), "step": result.step, "path": str(result.path),
            "bytes": result.bytes, "mode": self._policy.mode.value, "stall_seconds": result.stall_s,
            "write_seconds": result.seconds, "mb_per_s": result.mb_per_s, "buffer_bytes": self._saver.buffer_bytes,
            "engine": result.engine, "note": result.note,
            **({"advised_interval_s": advice.interval_s} if advice is not None else {}),
        })  # fmt: skip


def _but_for_numbers(note: str) -> str:
    return re.sub(r"\d+", "", note)
