"""Trains the recipes of `examples/` with each schedule, at equal samples, and reads the held-out loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.places import RanksFailed, run_checked
from benchmarks.starting import LAUNCH, REPOSITORY, user_environment

HPCTRAIN = [*LAUNCH[:-1]]  # as LAUNCH runs the command `hpctrain launch`


@dataclass(frozen=True, kw_only=True)
class Course:
    """A training that is repeated with each schedule.

    recipe: a file in `examples/`. packing: the words after `hpctrain data pack`. changes: overrides of the recipe.
    metric: what is compared, a held-out loss.
    """

    recipe: str
    packing: tuple[str, ...]
    changes: Mapping[str, Any]
    metric: str


def pack(course: Course, *, directory: Path, timeout_s: float) -> None:
    """Makes the dataset of a course in `directory`."""
    words = [*HPCTRAIN, "data", "pack", *course.packing[:-1], str(directory / course.packing[-1])]
    run_checked(words, what="packing", environ=user_environment(), timeout_s=timeout_s)


def train(
    course: Course,
    schedule: Mapping[str, Any] | None,
    *,
    name: str,
    seed: int,
    directory: Path,
    timeout_s: float,
) -> float:
    """Trains on two ranks, each a node of its own, and returns the held-out metric. Raises RanksFailed."""
    data = directory / course.packing[-1]
    changes: dict[str, Any] = {
        **course.changes, "run.directory": str(directory / name), "run.seed": seed, "data.train": str(data / "train"),
        "data.held_out": str(data / "test"), "reduction.wire": "fp32", "checkpoint.mode": "sync",
        "run.threads_per_rank": 1,
    }  # fmt: skip
    for key, value in (schedule or {}).items():
        changes[f"reduction.schedule.{key}"] = value
    words = [
        *LAUNCH,
        "-n",
        "2",
        "--ranks-per-node",
        "1",
        "--",
        "hpctrain",
        "train",
        str(REPOSITORY / course.recipe),
    ]
    for key, value in changes.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    run_checked(words, what=name, environ=user_environment(), timeout_s=timeout_s)
    summary = json.loads((directory / name / "summary.json").read_text())
    try:
        return float(summary["quality"][course.metric])
    except KeyError:
        raise RanksFailed(f"{name}: the summary has no {course.metric}: {sorted(summary)}") from None
