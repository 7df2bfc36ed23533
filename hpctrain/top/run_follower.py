"""Follows a run directory. Each refresh reads only what was written since the previous refresh."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint import finished_newest_first, step_of
from hpctrain.errors import UsageError
from hpctrain.supervise import Attempt, read_attempts
from hpctrain.top.state import RunFiles, RunHistory, RunState, state_of

# Files of a run in progress: JSON lines that are appended, and small files that are replaced as a
# whole.
#
# Each is opened for every look, since over NFS the size of a file is current only after an open.


@final
class AppendedRecords:
    """Reads the records that are appended to a file.

    max_bytes: the largest number of bytes that one call of `read` reads, from the end of the file. modified: the
    modification time of the file in seconds since 1970, by the file server's clock.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._inode = 0
        self._offset = 0
        self.modified = 0.0

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete lines that were appended since the last call, or all lines if the file was replaced.

        If these lines have more than `max_bytes` bytes, only the lines in the last `max_bytes` are returned. Returns []
        if the file does not exist. Raises OSError.
        """
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                self.modified = found.st_mtime
                begin = max(self._offset, found.st_size - self._max_bytes)
                file.seek(begin)
                data = file.read(found.st_size - begin)
        except FileNotFoundError:
            self._inode = self._offset = 0
            return []
        end = data.rfind(b"\n") + 1
        self._offset = begin + end
        return [record for line in data[:end].splitlines() if (record := _object(line)) is not None]


@final
class SmallFile:
    """A file that is replaced as a whole.

    content: the content of the file; None if it does not exist. modified: the modification time of the file in seconds
    since 1970, by the file server's clock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.content: bytes | None = None
        self.modified = 0.0

    def refresh(self) -> bool:
        """Reads the file if it has changed since the last call. Returns True for a changed file. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                seen = (found.st_ino, found.st_size, found.st_mtime_ns)
                if seen == self._seen:
                    return False
                self._seen, self.content, self.modified = seen, file.read(), found.st_mtime
        except FileNotFoundError:
            changed = self._seen is not None
            self._seen, self.content, self.modified = None, None, 0.0
            return changed
        return True

    def json(self) -> dict[str, Any] | None:
        """Returns the JSON object in the file; None if the file contains no object."""
        return None if self.content is None else _object(self.content)


def _object(text: bytes) -> dict[str, Any] | None:
    """Returns the JSON object; None for anything else, such as the rest of a line whose start was not read."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# Reads a run directory again and again, each time only what is new.


# Of more ranks that record, the records of the first ones are read; the efficiency that is shown is of all ranks.
MOST_RANKS = 64
# Read at once at most: of rank 0 some thousand steps, of another rank some hundred. A line of starts.jsonl names every
# rank, in some 150 bytes.
_RANK_0_BYTES = 4 << 20
_RANK_BYTES = 128 << 10
_STARTS_BYTES = 64 << 20
# Ranks may begin to record during a run, when they meet damaged data.
_LIST_EVERY_S = 30.0
_RECORDS = re.compile(r"rank-(\d+)\.jsonl")


@final
class RunFollower:
    """Follows one run.

    A refresh opens one file per followed rank and seven other files, and reads only what is new. The folder of the
    checkpoints is listed only if that folder has changed. Raises UsageError if the directory is not a run directory.
    """

    def __init__(self, directory: Path) -> None:
        if not (directory / "starts.jsonl").is_file():
            what = (
                "does not exist"
                if not directory.exists()
                else "has no starts.jsonl, which a run writes when it begins"
            )
            raise UsageError(f"{directory} {what}: give the directory of a run, run.directory of its recipe")
        self._directory = directory
        self._history = RunHistory()
        self._starts = AppendedRecords(directory / "starts.jsonl", max_bytes=_STARTS_BYTES)
        self._records: dict[int, AppendedRecords] = {}
        self._listed_at = float("-inf")
        self._files = {
            name: SmallFile(directory / path)
            for name, path in (
                ("summary", "summary.json"), ("ending", "watch/ending.json"), ("slow", "slow.json"),
                ("limits", "limits.json"), ("micro_batch", "micro-batch.json"), ("attempts", "attempts.jsonl"),
            )
        }  # fmt: skip
        self._attempts: tuple[Attempt, ...] = ()
        self._checkpoints_at = -1
        self._checkpoint: tuple[int, float] | None = None

    def refresh(self, *, now: float) -> RunState:
        """Reads what is new, and returns the current state of the run.

        now: the current time in seconds since 1970. Raises OSError, and LaunchError if attempts.jsonl cannot be read.
        """
        starts = self._starts.read()
        if starts:
            self._history.begin(starts[-1])
            self._listed_at = float("-inf")
        if now >= self._listed_at + _LIST_EVERY_S:
            self._listed_at = now
            self._follow_ranks()
        for rank, records in self._records.items():
            self._history.add(rank, records.read())
        files = self._read_files()
        return state_of(self._history, files, directory=str(self._directory), now=now)

    def _follow_ranks(self) -> None:
        folder = self._directory / "metrics"
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return
        recorded = sorted(int(match[1]) for name in names if (match := _RECORDS.fullmatch(name)))
        # A run that continues on fewer ranks leaves the files of the others.
        ranks = [rank for rank in recorded if rank < self._history.num_ranks][:MOST_RANKS]
        self._records = {
            rank: self._records.get(rank)
            or AppendedRecords(
                folder / f"rank-{rank:05}.jsonl", max_bytes=_RANK_BYTES if rank else _RANK_0_BYTES
            )
            for rank in ranks
        }

    def _read_files(self) -> RunFiles:
        changed = {name for name, file in self._files.items() if file.refresh()}
        if "attempts" in changed:
            self._attempts = read_attempts(self._directory)
        # Of an earlier start they say nothing; both times are of the file server's clock.
        current = {
            name: file.json() if file.modified >= self._starts.modified else None
            for name, file in self._files.items()
        }
        return RunFiles(
            summary=current["summary"], ending=current["ending"], slow=current["slow"],
            limits=self._files["limits"].json(), micro_batch=self._files["micro_batch"].json(),
            attempts=self._attempts, checkpoint=self._newest_checkpoint(),
        )  # fmt: skip

    def _newest_checkpoint(self) -> tuple[int, float] | None:
        """Returns the step and the time of the newest finished checkpoint; None if there is none.

        Lists the folder only if it has changed.
        """
        start = self._history.start or {}
        given = start.get("recipe", {}).get("checkpoint", {}).get("directory")
        folder = Path(given) if given else self._directory / "checkpoints"
        try:
            changed_at = folder.stat().st_mtime_ns
            if changed_at != self._checkpoints_at:
                paths = finished_newest_first(folder)
                self._checkpoint = (step_of(paths[0]) or 0, paths[0].stat().st_mtime) if paths else None
                self._checkpoints_at = changed_at
        except FileNotFoundError:  # it does not exist yet, or was deleted
            return self._checkpoint
        return self._checkpoint
