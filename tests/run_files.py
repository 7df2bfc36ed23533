"""What a run has left in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import finished_newest_first
from hpctrain.telemetry import read_records


def records_of(directory: Path, kind: str = "step", *, rank: int = 0) -> list[dict[str, Any]]:
    """Returns a rank's records of one kind; none if it has no file yet."""
    path = directory / "metrics" / f"rank-{rank:05}.jsonl"
    return [record for record in read_records(path) if record["kind"] == kind] if path.exists() else []


def newest(directory: Path, kind: str, *, rank: int = 0) -> dict[int, dict[str, Any]]:
    """Returns a rank's records of one kind by step; of a step that was repeated, the later one."""
    return {record["step"]: record for record in records_of(directory, kind, rank=rank)}


def losses_of(directory: Path) -> dict[int, float]:
    """Returns the loss by step; of a step that was repeated, the later one."""
    return {step: record["loss"] for step, record in newest(directory, "step").items()}


def summary_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


def saved_steps(directory: Path, *, folder: str = "checkpoints") -> list[int]:
    """Returns the steps of the finished checkpoints, files or folders, in order."""
    return sorted(int(path.stem.split("-")[1]) for path in finished_newest_first(directory / folder))
