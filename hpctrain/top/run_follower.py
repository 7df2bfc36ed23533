"""Reads a run directory again and again, each time only what is new."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import final

from hpctrain.checkpoint import finished_newest_first, step_of
from hpctrain.errors import UsageError
from hpctrain.supervise import Attempt, read_attempts
from hpctrain.top.growing_files import AppendedRecords, SmallFile
from hpctrain.top.history import RunHistory
from hpctrain.top.state import RunFiles, RunState, state_of

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
    """One run. What a call of `refresh` costs on the filesystem: an open of each followed rank's file and of seven
    others, the bytes that were appended, and a listing of the checkpoints if there is a new one.

    Raises UsageError if the directory is not that of a run.
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
        """Returns the frame of this moment. now: s since 1970. Raises OSError, and LaunchError for an unreadable
        ledger."""
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
        """Returns the step of the newest finished checkpoint and its time; lists the folder only if it has changed."""
        start = self._history.start or {}
        given = start.get("recipe", {}).get("checkpoint", {}).get("directory")
        folder = Path(given) if given else self._directory / "checkpoints"
        try:
            changed_at = folder.stat().st_mtime_ns
            if changed_at != self._checkpoints_at:
                paths = finished_newest_first(folder)
                self._checkpoint = (step_of(paths[0]) or 0, paths[0].stat().st_mtime) if paths else None
                self._checkpoints_at = changed_at
        except FileNotFoundError:  # there is none yet, or it was deleted meanwhile
            return self._checkpoint
        return self._checkpoint
