"""`Saver` runs the saves of one run, one at a time, in the foreground or in the background.

The module also receives requests for a checkpoint on demand, by a file or by a signal. The module is independent of the
training loop. All ranks must call a collective method after the same step. `Saver.ready` is not collective, so its
result can be added to an all-reduce that the training loop does anyway.
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol, final

import torch

from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.saving.background import BackgroundThread, HostBuffers
from hpctrain.checkpoint.saving.save import CheckpointSave, SaveResult
from hpctrain.checkpoint.saving.save_options import SaveOptions
from hpctrain.comm import Collective
from hpctrain.errors import HpctrainError, UsageError


class SaveMode(Enum):
    """How long training waits for a save.

    SYNC: until the checkpoint is committed. ASYNC: only while the state is copied to host memory; a thread writes
    the copy.
    """

    SYNC = "sync"
    ASYNC = "async"


class WhenBusy(Enum):
    """What a new save does while an earlier one is in progress.

    WAIT: the new save waits until the earlier one is committed. SKIP: the new save is skipped.
    """

    WAIT = "wait"
    SKIP = "skip"


def saving_into(
    directory: Path | str, *, comm: Collective, options: SaveOptions | None = None
) -> Callable[..., CheckpointSave]:
    """Returns the function that a `Saver` calls to start saves into `directory`.

    This function is not collective, but the returned function is.

    Args:
        directory: Directory of the checkpoints; the same on every rank.
        comm: The ranks that save together.
        options: Options of each save; None: the defaults.
    """
    return functools.partial(
        CheckpointSave.begin, directory=directory, comm=comm, options=options or SaveOptions()
    )


@final
class Saver:
    """Runs the saves of a run in one mode, with at most one save in progress.

    At the end of a `with` block, the object waits for the save in progress. An error of a background save is raised on
    all ranks, by the collective method that is called next.

    Args:
        begin: Function that starts a save. The function takes the arguments of `CheckpointSave.begin` except
            `directory`, `comm` and `options`; `saving_into` or `saving_through` makes the function.
        comm: The ranks that save together.
        mode: Whether training waits for the whole save ("sync") or only for the copy of the state ("async").
        when_busy: What a new save does while another is in progress: "wait" or "skip".
        on_saved: Called with the result on every rank, after the same step, when a checkpoint has been committed.

    Raises:
        ValueError: If `mode` or `when_busy` is unknown.
    """

    def __init__(
        self,
        begin: Callable[..., CheckpointSave],
        *,
        comm: Collective,
        mode: SaveMode | str = SaveMode.SYNC,
        when_busy: WhenBusy | str = WhenBusy.WAIT,
        on_saved: Callable[[SaveResult], object] = lambda saved: None,
    ) -> None:
        self._begin = begin
        self._comm = comm
        self._mode = SaveMode(mode)
        self._when_busy = WhenBusy(when_busy)
        self._on_saved = on_saved
        self._saving: CheckpointSave | None = None  # the save in progress
        self._closed = False
        self._thread: BackgroundThread | None = None
        self._buffers: HostBuffers | None = None
        if self._mode is SaveMode.ASYNC:
            self._thread = BackgroundThread(name="hpctrain-checkpoint")
            self._buffers = HostBuffers()
            atexit.register(self._at_exit)

    # ------------------------------------------------------------------ state

    @property
    def in_flight_step(self) -> int | None:
        """Step of the save in progress, or None. The same on all ranks."""
        return self._saving.step if self._saving is not None else None

    @property
    def would_skip(self) -> bool:
        """True if `save` would skip now, since `when_busy` is SKIP and a save is in progress. The same on all ranks."""
        return self._saving is not None and self._when_busy is WhenBusy.SKIP

    @property
    def buffer_bytes(self) -> int:
        """Size of this rank's host memory for the copy of the state, in bytes; 0 in mode SYNC."""
        return self._buffers.num_bytes if self._buffers is not None else 0

    def ready(self) -> bool:
        """Returns True if no save is in progress, or if `advance` would not wait for this rank. Not collective."""
        return self._saving is None or self._saving.ready()

    # ------------------------------------------------------------------ collective

    def save(self, state: State, *, step: int) -> bool:
        """Saves `state` (mode SYNC), or starts to save it (mode ASYNC). Collective.

        The state's tensors may change as soon as this returns.

        Args:
            state: This rank's part of the content.
            step: Step of the checkpoint; the same on every rank.

        Returns:
            False if the save was skipped because another save is in progress.

        Raises:
            UsageError: After `close`.
            CheckpointError: On every rank, if this save or the previous save has failed.
        """
        if self._closed:
            raise UsageError(f"cannot save step {step}: this Saver is closed; create another")
        if self.would_skip:
            return False
        self.finish()
        self._saving = self._begin(state, step=step, buffers=self._buffers, executor=self._thread)
        if self._mode is SaveMode.SYNC:
            self.finish()
        return True

    def advance(self) -> None:
        """Waits for this rank's work in the current phase of a save, then starts the next phase. Collective.

        The phases of a save are writing and committing. The call takes almost no time if `ready` is True on all ranks.
        Does nothing if no save is in progress.
        """
        self._continue(CheckpointSave.advance)

    def poll(self) -> None:
        """Calls `advance` if `ready` is True on all ranks. Collective.

        A call costs an all-reduce of one number while a save is in progress, nothing otherwise. `poll` is for loops
        that have no all-reduce of their own to which the result of `ready` could be added.
        """
        if self._saving is None:
            return
        votes = torch.tensor([float(self.ready())])
        self._comm.all_reduce(votes)
        if int(votes) == self._comm.num_ranks:
            self.advance()

    def finish(self) -> None:
        """Waits until the save in progress, if any, is committed. Collective."""
        self._continue(CheckpointSave.finish)

    def close(self) -> None:
        """Waits for the save in progress, then frees the host memory and ends the thread. Collective."""
        if self._closed:
            return
        try:
            self.finish()
        finally:
            self._release(wait=True)

    def abandon(self) -> None:
        """Drops the save in progress without committing it, for a rank that fails alone. Not collective.

        The next save removes the incomplete checkpoint.
        """
        self._saving = None
        self._release(wait=False)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, HpctrainError) and error.agreed:
            # All ranks have this error, so they can still commit together. This error is raised, others are printed.
            step = self.in_flight_step
            try:
                self.close()
            except HpctrainError as lost:
                if self._comm.rank == 0:
                    _say_lost(step, lost)
        else:
            self.abandon()

    # ------------------------------------------------------------------ details

    def _continue(self, act: Callable[[CheckpointSave], SaveResult | None]) -> None:
        """Calls `act` with the save in progress, if there is one. Collective.

        If `act` raises an error or returns a result, the save has ended.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        result = act(saving)
        if result is None:
            self._saving = saving
        else:
            self._on_saved(result)

    def _release(self, *, wait: bool) -> None:
        self._closed = True
        if self._buffers is not None and self._saving is None:
            self._buffers.release()
        if self._thread is not None:
            self._thread.shutdown(wait=wait)
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Commits the save in progress if the program ends without `close`.

        Does nothing after an uncaught exception, since the other ranks might not take part.
        """
        if self._saving is None or getattr(sys, "last_value", None) is not None:
            return
        step = self._saving.step
        try:
            self.finish()
        except HpctrainError as error:
            _say_lost(step, error)


def _say_lost(step: int | None, error: HpctrainError) -> None:
    print(f"hpctrain: the checkpoint of step {step} was not saved: {error}", file=sys.stderr, flush=True)


# Checkpoints on demand: requested by a file in the run directory, or by a signal.
#
# Nothing here communicates: the training loop adds the result to the vote that it takes at each step.


FILE_NAME = "save-now"


def ask_for_save(run_directory: Path) -> Path:
    """Requests a checkpoint of a running training after its current step.

    Args:
        run_directory: The run's directory, which contains `recipe.toml`.

    Returns:
        The path of the request file, which the run removes when it saves.

    Raises:
        UsageError: If `run_directory` is not the directory of a run or cannot be written to.
    """
    if not (run_directory / "recipe.toml").is_file():
        raise UsageError(f"{run_directory} has no recipe.toml: give the directory of a run (run.directory)")
    path = run_directory / FILE_NAME
    try:
        path.touch()
    except OSError as error:
        raise UsageError(f"cannot request a checkpoint: cannot create {path}: {error.strerror}") from error
    return path


class AskedBySignal(Protocol):
    """Interface of a signal handler that records the time at which this rank received the signal.

    `received_s` is that time in seconds of the monotonic clock, or None if no signal has been received.
    """

    received_s: float | None


@final
class CheckpointRequests:
    """Polls for requests of a checkpoint, by file or by signal. Not collective.

    `run_directory` is the directory of the request file; only one rank passes it, the others pass None. `every_s`
    is the minimum time between two polls of the file, since the directory is on a shared filesystem. A signal that
    arrives less than `same_request_s` seconds after a save is ignored: a signal sent to all ranks reaches them at
    different times, so a late one still belongs to the request for that save.
    """

    def __init__(
        self,
        *,
        run_directory: Path | None,
        save_signal: AskedBySignal | None = None,
        every_s: float = 1.0,
        same_request_s: float = 2.0,
    ) -> None:
        self._path = run_directory / FILE_NAME if run_directory is not None else None
        self._signal = save_signal
        self._every_s = every_s
        self._same_request_s = same_request_s
        self._looked_s = -math.inf
        self._taken_s = -math.inf
        self._found = False

    def asked(self) -> bool:
        """Returns True if a checkpoint is requested, by file or by signal. Stays True until `taken` is called."""
        now = time.monotonic()
        if not self._found and self._path is not None and now - self._looked_s >= self._every_s:
            self._looked_s = now
            # A filesystem error must not end the training.
            try:
                self._found = self._path.exists()
            except OSError:
                self._found = False
        received_s = self._signal.received_s if self._signal is not None else None
        return self._found or (received_s is not None and received_s - self._taken_s >= self._same_request_s)

    def taken(self) -> None:
        """Marks the request for a checkpoint as answered.

        Call this method on all ranks before the save, so that requests that arrive during the save are for the next
        checkpoint.
        """
        self._taken_s = time.monotonic()
        if self._signal is not None:
            self._signal.received_s = None
        if self._found and self._path is not None:
            self._found = False
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                # The file cannot be removed: stop polling it, or it would request a checkpoint at every poll.
                self._path = None
