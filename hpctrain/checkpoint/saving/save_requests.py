"""Checkpoints on demand: requested by a file in the run directory, or by a signal.

Nothing here communicates: the training loop adds the result to the vote that it takes at each step.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Protocol, final

from hpctrain.errors import UsageError

FILE_NAME = "save-now"


def ask_for_save(run_directory: Path) -> Path:
    """Requests a checkpoint of the run in `run_directory` after its current step. Returns the path of the request file.

    Raises UsageError if `run_directory` is not the directory of a run or cannot be written to.
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
    """received_s: time at which this rank received the signal, on the monotonic clock; None: not received."""

    received_s: float | None


@final
class SaveRequests:
    """Polls for requests of a checkpoint, by file or by signal. Not collective.

    run_directory: directory of the request file; None on all ranks except the one that polls it.
    every_s: minimum time between two polls, since the directory is on a shared filesystem.
    same_request_s: a signal within this time after a save counts as the request for that save, since a signal sent to
        all ranks reaches them at different times.
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
        """True if a checkpoint is requested; stays true until `taken` is called."""
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
        """Clears the request. To be called on all ranks before the save; later requests are for another checkpoint."""
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
