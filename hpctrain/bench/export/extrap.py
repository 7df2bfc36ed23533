"""Writes a scaling sweep as JSON lines for Extra-P. Pure.

The format is that of Extra-P's docs/file-formats.md, section JSON Lines: a line has `params`, `callpath`, `metric` and
`value`, here the list of the repeats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from hpctrain.bench.scaling.sweep import PARTS, ScalingDocument, ScalingRun
from hpctrain.telemetry import OPTIONAL_KEYS

EXTRAP_SIZES = 5  # the numbers of ranks that Extra-P's modeler asks for


def extrap_lines(document: ScalingDocument) -> list[str]:
    """Returns the lines of the file. Each has the seconds per step of one size and part of a step, one value per run.

    The callpaths are `step`, and `step->NAME` for its parts; the parameter is the number of ranks, `p`. A value is the
    mean over the run's ranks and measured steps; for `step` it is that of the slowest rank.
    """
    by_ranks: dict[int, list[ScalingRun]] = {}
    for run in document.runs:
        by_ranks.setdefault(run.ranks, []).append(run)
    return [
        json.dumps({"params": {"p": ranks}, "callpath": callpath, "metric": "time", "value": values})
        for ranks, runs in sorted(by_ranks.items())
        for callpath, values in _values(runs)
    ]


def extrap_notes(document: ScalingDocument) -> list[str]:
    """Returns notes that a reader should know before modeling."""
    sizes = len({run.ranks for run in document.runs})
    if sizes < EXTRAP_SIZES:
        return [f"Extra-P asks for at least {EXTRAP_SIZES} numbers of ranks; there are {sizes}"]
    return []


def _values(runs: list[ScalingRun]) -> Iterator[tuple[str, list[float]]]:
    yield "step", [sum(run.step_s) / len(run.step_s) for run in runs]
    for name in PARTS:
        values = [_mean_s(run, name) for run in runs]
        if name not in OPTIONAL_KEYS or any(values):
            yield f"step->{name}", values


def _mean_s(run: ScalingRun, name: str) -> float:
    total = sum(rank.seconds.get(name, 0.0) for rank in run.by_rank)
    return total / len(run.by_rank) / len(run.step_s)
