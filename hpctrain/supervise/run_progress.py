"""What an attempt has achieved, read from the run directory: when training began, at which step, and how far it came.

Files are compared with what they were when the attempt began, not by their times: the clocks of nodes may differ. They
are opened each time, since over NFS the size of a file is only current after an open.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import final

from hpctrain.checkpoint import finished_newest_first, step_of
from hpctrain.errors import CheckpointError

# The line of a start holds the whole environment; the step is among its first fields (`hpctrain/run/training.py`).
_START = re.compile(rb'^\{"time": [\d.e+]+, "step": (\d+),', re.MULTILINE)
STEPS = Path("metrics", "rank-00000.jsonl")
_MAX_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16


@final
class RunProgress:
    """One attempt's progress; make it before the attempt begins.

    directory: the run directory. checkpoints: folder of the finished checkpoints.
    """

    def __init__(self, directory: Path, *, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._starts = _NewContent(directory / "starts.jsonl")
        self._steps = _NewContent(directory / STEPS)
        self._ending = _NewContent(directory / "watch" / "ending.json")

    @classmethod
    def of_all(cls, directory: Path, *, checkpoints: Path) -> RunProgress:
        """Returns the progress of all that was ever recorded in the directory, for an attempt that has ended."""
        progress = cls(directory, checkpoints=checkpoints)
        for content in (progress._starts, progress._steps, progress._ending):
            content.forget()
        return progress

    def first_step(self) -> int | None:
        """Returns the step from which training began: 0, or that of a checkpoint. None: it has not begun."""
        found = _START.findall(self._starts.read(_MAX_BYTES))
        return int(found[-1]) if found else None

    def last_step(self) -> int | None:
        """Returns the last step in rank 0's records, which are up to a second old; None if there is none."""
        for line in reversed(self._steps.read(_TAIL_BYTES).split(b"\n")[:-1]):
            try:
                record = json.loads(line)
            except ValueError:  # the first of these lines may be cut
                continue
            if isinstance(record, dict) and record.get("kind") == "step":
                return int(record["step"])
        return None

    def newest_checkpoint(self) -> int | None:
        """Returns the step of the newest finished checkpoint in the shared folder; None if there is none."""
        try:
            paths = finished_newest_first(self._checkpoints)
        except CheckpointError:
            return None
        return step_of(paths[0]) if paths else None

    def announced_ending(self) -> str | None:
        """Returns why the ranks ended the run, as one of them announced it (`watch/ending.json`); None: none did."""
        try:
            ending = json.loads(self._ending.read(_TAIL_BYTES))
            return f"hpctrain: rank {ending['rank']} on {ending['host']} ends the run: {ending['reason']}"
        except (ValueError, KeyError, TypeError):
            return None


class _NewContent:
    """What is added to a file, or stands in a file that has replaced it, after this object was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._size = 0, 0
        try:
            found = os.stat(path)
        except OSError:
            return
        self._inode, self._size = found.st_ino, found.st_size

    def forget(self) -> None:
        """Takes all of the file for new."""
        self._inode, self._size = 0, 0

    def read(self, max_bytes: int) -> bytes:
        """Returns the last `max_bytes` of it at most."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                is_same = found.st_ino == self._inode and found.st_size >= self._size
                begin = max(self._size if is_same else 0, found.st_size - max_bytes)
                file.seek(begin)
                return file.read(max_bytes)
        except OSError:
            return b""
