"""The background thread that copies files of a dataset to a node's own storage, within a bound."""

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

_LOOK_AGAIN_S = 0.2
_FULL_DISK_PAUSE_S = 10.0


@final
class Stager:
    """Copies the files in turn, from the one on that was wanted last. Failures never end the run.

    Files stay until the room is needed. Then the one goes that was not read for longest: if it was read at
    all since it came, nobody has read it for `idle_s`, and nobody holds it.
    problems: why files were not copied, by file name.
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
        """folder: this process is its stager."""
        self.problems: dict[str, str] = {}
        self.copied_bytes = 0
        self.wanted: int | None = None
        """Number of a file without a copy that a reader of this process has just read from; readers set it."""
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
            except OSError as error:  # the folder itself: somebody may have removed it
                self.problems[str(self._folder.path)] = str(error)
                pause_s = _FULL_DISK_PAUSE_S
            if pause_s is None:
                return
            self._stop.wait(pause_s)

    def _step(self) -> float | None:
        """Copy for a while; seconds until the next time, None if all that can be there is there."""
        there = self._folder.names()
        missing = [
            number
            for number, file in enumerate(self._files)
            if file.name not in there and file.name not in self.problems
        ]
        if not missing:
            return None
        # On from where samples are read now; else in turn, so that what just went does not come back first.
        if self.wanted is not None:
            self._next, self.wanted = self.wanted, None
        first, began = self._next, time.monotonic()
        room = self._max_bytes - self._folder.num_bytes()
        for number in sorted(missing, key=lambda number: (number - first) % len(self._files)):
            file = self._files[number]
            if file.num_bytes > self._max_bytes:
                self.problems[file.name] = f"{file.num_bytes} bytes, more than the bound of {self._max_bytes}"
                continue
            if room < file.num_bytes:
                room = self._make_room(file.num_bytes)
            if room < file.num_bytes:
                return _LOOK_AGAIN_S
            self._next = (number + 1) % len(self._files)
            if self._copy(file):
                room -= file.num_bytes
            if self.wanted is not None or time.monotonic() - began > _LOOK_AGAIN_S:
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
        self.copied_bytes += file.num_bytes
        return True

    def _make_room(self, num_bytes: int) -> int:
        """Bytes that fit the bound, after what may go for `num_bytes` more has gone."""
        path = self._folder.path
        for leaving in path.glob(f"{LEAVING}*"):
            remove_unread(leaving)  # its readers let it go one by one
        room = self._max_bytes - self._folder.num_bytes()
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
            if room + leaving_bytes >= num_bytes:
                break
            # Without its name nobody finds it any more; who has it open reads on from it.
            gone = path / f"{LEAVING}{file.name}"
            (path / file.name).rename(gone)
            if remove_unread(gone):
                room += file.num_bytes
            else:
                leaving_bytes += file.num_bytes
        return room

    def close(self) -> None:
        """End the thread, also in the middle of a file. May be called again."""
        self._stop.set()
        self._thread.join()
