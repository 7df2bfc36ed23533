"""What a run's directory says of it: starts, newest steps and their speed, newest good checkpoint, how it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import finished_newest_first, read_structure, step_of
from hpctrain.errors import CheckpointError, LaunchError
from hpctrain.telemetry import read_records

# The speed is that of the steps in this many last bytes of rank 0's records, some 150 steps.
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class CheckpointFound:
    """A checkpoint whose structure and metadata are intact. saved: seconds since 1970."""

    path: str
    step: int
    saved: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the run directory says.

    num_starts: how often training began or resumed. step: newest recorded; None before the first. last_step_at: when
    that was, seconds since 1970. steps_per_s: of the newest start's last steps. damaged: newer checkpoints that are not
    good. status: `finished`, `stopped` or `diverged` if the newest start ended so, else None. job_id: Slurm's, of the
    newest start.
    """

    num_starts: int = 0
    step: int | None = None
    total_steps: int | None = None
    last_step_at: float | None = None
    loss: float | str | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    checkpoint: CheckpointFound | None = None
    damaged: tuple[str, ...] = ()
    status: str | None = None
    job_id: str | None = None

    @property
    def seconds_to_go(self) -> float | None:
        if self.step is None or self.total_steps is None or not self.steps_per_s:
            return None
        return (self.total_steps - self.step) / self.steps_per_s


def read_progress(run_directory: Path, *, checkpoints: Path | None = None) -> Progress:
    """Reads what a run has written so far. checkpoints: their directory, if it is not in the run directory.

    Raises LaunchError if files that are there cannot be read.
    """
    try:
        starts = _records(run_directory / "starts.jsonl")
        began_at = float(starts[-1]["time"]) if starts else 0.0
        steps = [
            record
            for record in _newest_steps(run_directory / "metrics" / "rank-00000.jsonl")
            if record["time"] >= began_at
        ]
        status = _status(run_directory / "summary.json", began_at=began_at)
        checkpoint, damaged = _newest_good(checkpoints or run_directory / "checkpoints")
    except (OSError, ValueError, KeyError) as error:
        raise LaunchError(f"the run directory {run_directory} cannot be read: {error}") from error
    total = starts[-1].get("total_steps") if starts else None
    found: dict[str, Any] = {}
    if steps:
        first, last = steps[0], steps[-1]
        found = {"step": last["step"], "last_step_at": last["time"], "loss": last["loss"]}
        seconds = last["time"] - first["time"]
        if seconds > 0:
            found["steps_per_s"] = (last["step"] - first["step"]) / seconds
            found["samples_per_s"] = (last["global_samples"] - first["global_samples"]) / seconds
    elif starts:
        found = {"step": starts[-1]["step"]}
    if starts:
        found["job_id"] = starts[-1].get("environment", {}).get("variables", {}).get("SLURM_JOB_ID")
    return Progress(
        num_starts=len(starts),
        total_steps=total,
        checkpoint=checkpoint,
        damaged=damaged,
        status=status,
        **found,
    )


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return list(read_records(path))
    except FileNotFoundError:
        return []


def _newest_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of steps in the last part of a file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    # The last piece is empty or a line that is being written, the first one may have been cut.
    for line in lines[1 if start else 0 : -1]:
        record = json.loads(line)
        if record.get("kind") == "step":
            yield record


def _status(path: Path, *, began_at: float) -> str | None:
    try:
        if path.stat().st_mtime < began_at:
            return None  # of an earlier start
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return str(summary["status"])


def _newest_good(directory: Path) -> tuple[CheckpointFound | None, tuple[str, ...]]:
    damaged = []
    for path in finished_newest_first(directory):
        try:
            metadata = read_structure(path).metadata
        except CheckpointError as error:
            if path.exists():  # not one that the run has just deleted
                damaged.append(str(error))
            continue
        step = step_of(path) or 0
        return CheckpointFound(path=str(path), step=step, saved=metadata.created_unix_s), tuple(damaged)
    return None, tuple(damaged)
