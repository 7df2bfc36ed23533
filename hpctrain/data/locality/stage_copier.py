"""Background thread that copies files of a dataset to node-local storage, within a bound of bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import final

from hpctrain.data.format.manifest import Manifest
from hpctrain.data.locality.node_folder import COPYING, LEAVING, StagedFile, StageFolder, remove_unread
from hpctrain.data.locality.verified_copy import CopyStopped, copy_file
from hpctrain.errors import DataError

_POLL_INTERVAL_S = 0.2
_FULL_DISK_PAUSE_S = 10.0


@final
class Stager:
    """Copies the files in order, starting at the file that was requested last. Failures never end the run.

    Copies are kept until disk space is needed. Then the least recently read one is removed, provided that it was read
    at least once, not within `idle_s` seconds, and that no process holds it.
    problems: file name -> reason why it was not copied.
    """

    def __init__(
        self,
        folder: StageFolder,
        *,
        files: Sequence[StagedFile],
        manifest: Manifest,
        max_bytes: int,
        idle_s: float,
    ) -> None:
        """folder: this process must be its stager. max_bytes: bound on all copies. Starts the thread."""
        self.problems: dict[str, str] = {}
        self.wanted: int | None = None
        """Number of a file without a copy that this process has just read; set by the readers."""
        self._next = 0
        self._folder = folder
        self._files = files
        self._manifest = manifest
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-stager", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                pause_s = self._step()
            except CopyStopped:
                return
            except OSError as error:  # of the folder, which may have been removed
                self.problems[str(self._folder.path)] = str(error)
                pause_s = _FULL_DISK_PAUSE_S
            if pause_s is None:
                return
            self._stop.wait(pause_s)

    def _step(self) -> float | None:
        """Copies files for a short time. Returns the seconds to wait before the next call; None if all are copied."""
        there = self._folder.names()
        missing = [
            number
            for number, file in enumerate(self._files)
            if file.name not in there and file.name not in self.problems
        ]
        if not missing:
            return None
        # Continue at the file that is read now; else in order, so that a file that was just removed is not next.
        if self.wanted is not None:
            self._next, self.wanted = self.wanted, None
        first, began = self._next, time.monotonic()
        free_bytes = self._max_bytes - self._folder.num_bytes()
        for number in sorted(missing, key=lambda number: (number - first) % len(self._files)):
            file = self._files[number]
            if file.num_bytes > self._max_bytes:
                self.problems[file.name] = f"{file.num_bytes} bytes, more than the bound of {self._max_bytes}"
                continue
            if free_bytes < file.num_bytes:
                free_bytes = self._make_room(file.num_bytes)
            if free_bytes < file.num_bytes:
                return _POLL_INTERVAL_S
            self._next = (number + 1) % len(self._files)
            if self._copy(file):
                free_bytes -= file.num_bytes
            if self.wanted is not None or time.monotonic() - began > _POLL_INTERVAL_S:
                break
        return 0.0

    def _copy(self, file: StagedFile) -> bool:
        partial = self._folder.path / f"{COPYING}{file.name}"
        try:
            copy_file(file.source, partial, manifest=self._manifest, entries=file.entries, stop=self._stop)
            partial.rename(self._folder.path / file.name)
        except DataError as error:
            self.problems[file.name] = str(error)
            return False
        except OSError as error:
            self.problems[file.name] = f"{file.source} cannot be staged: {error}"
            return False
        return True

    def _make_room(self, num_bytes: int) -> int:
        """Removes idle copies until `num_bytes` more fit the bound, if possible. Returns the unused bytes of it."""
        path = self._folder.path
        for leaving in path.glob(f"{LEAVING}*"):
            remove_unread(leaving)  # removed once all its readers have released it
        free_bytes = self._max_bytes - self._folder.num_bytes()
        leaving_bytes = sum(leaving.stat().st_size for leaving in path.glob(f"{LEAVING}*"))
        idle = []
        now = time.time()
        for file in self._files:
            try:
                used = os.stat(path / file.name).st_atime
            except FileNotFoundError:
                continue
            if 0 < used < now - self._idle_s:
                idle.append((used, file))
        for _, file in sorted(idle, key=lambda pair: pair[0]):
            if free_bytes + leaving_bytes >= num_bytes:
                break
            # After the rename no process opens it; processes that have it open can still read it.
            gone = path / f"{LEAVING}{file.name}"
            (path / file.name).rename(gone)
            if remove_unread(gone):
                free_bytes += file.num_bytes
            else:
                leaving_bytes += file.num_bytes
        return free_bytes

    def close(self) -> None:
        """Ends the thread, also in the middle of a file. May be called more than once."""
        self._stop.set()
        self._thread.join()
