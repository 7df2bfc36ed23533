"""Reads the times of steps and the efficiencies from a run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.scaling.efficiency.attribution import StepTimes
from hpctrain.scaling.efficiency.pop import RECORDED, Efficiency
from hpctrain.telemetry import STEP, read_records

_NAMES = (*RECORDED, "step", "after_sync")


def read_step_times(directory: Path, *, first: int = 2, last: int | None = None) -> StepTimes:
    """Returns the recorded times of all ranks of the run in `directory`, of the steps from `first` to `last`.

    The first step of a run, in which buckets and memory are set up, is left out by default. Of a step that was done
    twice the later record counts. Raises UsageError if a rank has not recorded its steps, or no step is in all records.
    """
    num_ranks = _num_ranks(directory)
    by_rank: list[dict[int, Mapping[str, Any]]] = []
    for rank in range(num_ranks):
        path = directory / "metrics" / f"rank-{rank:05}.jsonl"
        try:
            records: dict[int, Mapping[str, Any]] = {
                r["step"]: r for r in read_records(path) if r["kind"] == STEP
            }
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the records of rank {rank} of {num_ranks} cannot be read ({path}: {error}): dividing each "
                "rank's time needs the records of all, which telemetry.ranks = 'all' writes"
            ) from error
        by_rank.append(records)
    wanted = [s for s in by_rank[0] if s >= first and (last is None or s <= last)]
    steps = sorted(s for s in wanted if all(s in records for records in by_rank))
    if not steps:
        raise UsageError(
            f"{directory / 'metrics'} has no step from {first} to {last or 'the end'} that all {num_ranks} ranks "
            "recorded"
        )
    if "after_sync" not in by_rank[0][steps[0]]["seconds"]:
        raise UsageError(
            f"the records in {directory / 'metrics'} were made by a version that did not divide its steps"
        )

    def carried(record: Mapping[str, Any] | None) -> float:
        return 0.0 if record is None else record["seconds"].get("after_sync", 0.0)

    return StepTimes(
        steps=np.array(steps),
        samples=np.array([sum(records[s]["samples"] for records in by_rank) for s in steps]),
        seconds={
            name: np.array([[_seconds(records[s], name) for s in steps] for records in by_rank])
            for name in _NAMES
        },
        carried=np.array([[carried(records.get(s - 1)) for s in steps] for records in by_rank]),
    )


def _seconds(record: Mapping[str, Any], name: str) -> float:
    # Versions before pipelines recorded no bubble.
    seconds: float = record["seconds"].get(name, 0.0) if name == "bubble" else record["seconds"][name]
    return seconds


def read_efficiency(directory: Path) -> Efficiency:
    """Returns the efficiency that the run in `directory` has measured over all ranks and steps since its last start.

    Raises UsageError if it has no summary yet, or one without it.
    """
    path = directory / "summary.json"
    try:
        return Efficiency.from_document(json.loads(path.read_text(encoding="utf-8"))["efficiency"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} has no efficiency ({type(error).__name__}: {error}): it is written at the end of a run of at "
            "least two steps"
        ) from error


def _num_ranks(directory: Path) -> int:
    path = directory / "environment.json"
    try:
        return len(json.loads(path.read_text(encoding="utf-8"))["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({error}): give the directory of a run") from error
