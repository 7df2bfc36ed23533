"""A checkpoint on demand: a file in the run directory asks, or a signal.

Nothing here communicates: what is found goes into the vote that the training loop takes anyway.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Protocol, final

from hpctrain.errors import UsageError

FILE_NAME = "save-now"


def ask_for_save(run_directory: Path) -> Path:
    """Ask the run in `run_directory` for a checkpoint after its present step. Returns the file that asks.

    UsageError when that is not the directory of a run, or cannot be written to.
    """
    if not (run_directory / "recipe.toml").is_file():
        raise UsageError(f"{run_directory} has no recipe.toml: give the directory of a run (run.directory)")
    path = run_directory / FILE_NAME
    try:
        path.touch()
    except OSError as error:
        raise UsageError(f"cannot ask for a checkpoint by {path}: {error.strerror}") from error
    return path


class AskedBySignal(Protocol):
    """received_s: when this rank was sent the signal, on the monotonic clock; None: it was not."""

    received_s: float | None


@final
class SaveRequests:
    """Whether a checkpoint is asked for, by the file or by the signal. Not collective.

    run_directory: looked at for the file; None on all ranks but the one that looks. At most one look in
    `every_s` seconds: the directory is on a shared filesystem.
    same_request_s: a signal sent to all ranks reaches them at different moments; so long after a save it still
    counts as the one that was answered.
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
        """Stays true until `taken`."""
        now = time.monotonic()
        if not self._found and self._path is not None and now - self._looked_s >= self._every_s:
            self._looked_s = now
            # A filesystem that cannot be asked right now is no reason to end the training.
            try:
                self._found = self._path.exists()
            except OSError:
                self._found = False
        received_s = self._signal.received_s if self._signal is not None else None
        return self._found or (received_s is not None and received_s - self._taken_s >= self._same_request_s)

    def taken(self) -> None:
        """Some rank was asked, and all are about to save: a request from now on is for another checkpoint."""
        self._taken_s = time.monotonic()
        if self._signal is not None:
            self._signal.received_s = None
        if self._found and self._path is not None:
            self._found = False
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                # It stays, and would ask again a second later, for ever.
                self._path = None
