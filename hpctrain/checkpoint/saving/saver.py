"""Saves of one run: one at a time, at once or in the background. Knows nothing of training.

Every method that says so is collective: all ranks call it after the same step. `ready` alone is a rank's own;
its vote may ride on a sum that the ranks take anyway.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol, final

import torch

from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.saving.background_thread import BackgroundThread
from hpctrain.checkpoint.saving.host_snapshot import HostBuffers
from hpctrain.checkpoint.saving.save import SaveOptions, SaveResult, Saving
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import HpctrainError, UsageError


class SaveMode(Enum):
    """SYNC: training stands still until the checkpoint is committed. ASYNC: while its state is copied."""

    SYNC = "sync"
    ASYNC = "async"


class WhenBusy(Enum):
    """What a save does that comes while one is still being written. WAIT: for it. SKIP: nothing."""

    WAIT = "wait"
    SKIP = "skip"


class InFlight(Protocol):
    """A save that has begun: `Saving`, or one that goes through more tiers."""

    def ready(self) -> bool: ...
    def advance(self) -> SaveResult | None: ...
    def finish(self) -> SaveResult: ...


class Begin(Protocol):
    """Begins a save. Collective. With `buffers` the state may change when it returns."""

    def __call__(
        self, state: State, *, step: int, buffers: HostBuffers | None, executor: Executor | None
    ) -> InFlight: ...


def saving_into(directory: Path | str, *, comm: Collective, options: SaveOptions | None = None) -> Begin:
    """Saves checkpoints into `directory`."""
    chosen = options or SaveOptions()

    def begin(state: State, *, step: int, buffers: HostBuffers | None, executor: Executor | None) -> InFlight:
        return Saving.begin(
            state,
            directory=directory,
            step=step,
            comm=comm,
            options=chosen,
            buffers=buffers,
            executor=executor,
        )

    return begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A committed checkpoint. stall_s: this rank stood still for it. write_s: from its beginning to its commit."""

    step: int
    result: SaveResult
    stall_s: float
    write_s: float

    @property
    def mb_per_s(self) -> float:
        return self.result.bytes / 1e6 / self.write_s if self.write_s > 0 else 0.0


@dataclass(slots=True)
class _Flight:
    step: int
    save: InFlight
    begun_s: float
    stall_s: float


@final
class Saver:
    """Saves in one mode, with at most one save in flight. A context manager: leaving waits for that one.

    on_saved: called on every rank when one is committed, after the same step.
    Errors of a save in the background are raised by the next collective method, the same on all ranks.
    """

    def __init__(
        self,
        begin: Begin,
        *,
        comm: Collective,
        mode: SaveMode | str = SaveMode.SYNC,
        when_busy: WhenBusy | str = WhenBusy.WAIT,
        on_saved: Callable[[Saved], object] = lambda saved: None,
    ) -> None:
        self._begin = begin
        self._comm = comm
        self._mode = SaveMode(mode)
        self._when_busy = WhenBusy(when_busy)
        self._on_saved = on_saved
        self._flight: _Flight | None = None
        self._closed = False
        self._thread: BackgroundThread | None = None
        self._buffers: HostBuffers | None = None
        if self._mode is SaveMode.ASYNC:
            self._thread = BackgroundThread(name="hpctrain-checkpoint")
            self._buffers = HostBuffers()
            atexit.register(self._at_exit)

    # ------------------------------------------------------------------ what is going on

    @property
    def in_flight_step(self) -> int | None:
        """The step that is being saved; None: nothing is in flight. The same on all ranks."""
        return self._flight.step if self._flight is not None else None

    @property
    def would_skip(self) -> bool:
        """A save now would be skipped: one is in flight, and the next does not wait. The same on all ranks."""
        return self._flight is not None and self._when_busy is WhenBusy.SKIP

    @property
    def buffer_bytes(self) -> int:
        """Host memory that the copies of the state take on this rank."""
        return self._buffers.num_bytes if self._buffers is not None else 0

    def ready(self) -> bool:
        """This rank's part of the present phase is done, or nothing is in flight. Not collective."""
        return self._flight is None or self._flight.save.ready()

    # ------------------------------------------------------------------ collective

    def save(self, state: State, *, step: int) -> bool:
        """Save `state`, or begin to. Collective. False: it was skipped, since one is in flight.

        In the background the state's tensors may change as soon as this returns.
        """
        if self._closed:
            raise UsageError(f"the checkpoint of step {step} comes after this saver was closed: make another")
        if self.would_skip:
            return False
        self.finish()
        begun_s = time.perf_counter()
        save = self._begin(state, step=step, buffers=self._buffers, executor=self._thread)
        self._flight = _Flight(step=step, save=save, begun_s=begun_s, stall_s=time.perf_counter() - begun_s)
        if self._mode is SaveMode.SYNC:
            self.finish()
        return True

    def advance(self) -> None:
        """Commit what is in flight one phase further; waits for this rank's part. Collective.

        Costs next to nothing once `ready` is true on all ranks.
        """
        if self._flight is not None:
            self._do(lambda flight: flight.save.advance())

    def poll(self) -> None:
        """`advance` when all ranks are ready; the vote costs a sum of one number while a save is in flight.
        Collective. For loops without a sum of their own that the vote could ride on."""
        if self._flight is None:
            return
        votes = torch.tensor([float(self.ready())])
        self._comm.all_reduce(votes)
        if int(votes) == self._comm.num_ranks:
            self.advance()

    def finish(self) -> None:
        """Wait until what is in flight is committed. Collective."""
        if self._flight is not None:
            self._do(lambda flight: flight.save.finish())

    def close(self) -> None:
        """Wait for what is in flight, and give memory and thread back. Collective."""
        if self._closed:
            return
        try:
            self.finish()
        finally:
            self._release(wait=True)

    def abandon(self) -> None:
        """Give up what is in flight: it is not committed. Not collective: for a rank that ends by an error of
        its own. What it has left is removed by the next save."""
        self._flight = None
        self._release(wait=False)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, HpctrainError) and error.agreed:
            # All ranks leave by this error, so they can still commit together; it is the one to be told.
            step = self.in_flight_step
            try:
                self.close()
            except HpctrainError as lost:
                if self._comm.rank == 0:
                    _say_lost(step, lost)
        else:
            self.abandon()

    # ------------------------------------------------------------------ details

    def _do(self, act: Callable[[_Flight], SaveResult | None]) -> None:
        flight = self._flight
        assert flight is not None
        started_s = time.perf_counter()
        try:
            result = act(flight)
        except BaseException:
            self._flight = None
            raise
        now_s = time.perf_counter()
        flight.stall_s += now_s - started_s
        if result is not None:
            self._flight = None
            self._on_saved(
                Saved(
                    step=flight.step,
                    result=result,
                    stall_s=flight.stall_s,
                    write_s=now_s - flight.begun_s,
                )
            )

    def _release(self, *, wait: bool) -> None:
        self._closed = True
        if self._buffers is not None and self._flight is None:
            self._buffers.release()
        if self._thread is not None:
            self._thread.shutdown(wait=wait)
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """A program that ends without `close` still gets its checkpoint, unless it ends by an error: then the
        other ranks may not come to commit it."""
        if self._flight is None or getattr(sys, "last_value", None) is not None:
            return
        step = self._flight.step
        try:
            self.finish()
        except HpctrainError as error:
            _say_lost(step, error)


def _say_lost(step: int | None, error: HpctrainError) -> None:
    print(f"hpctrain: the checkpoint of step {step} was not saved: {error}", file=sys.stderr, flush=True)
