"""Converts the document of a scaling sweep to JSON lines for Extra-P. Pure functions.

The format is that of Extra-P's docs/file-formats.md, section JSON Lines: each line has `params`, `callpath`, `metric`
and `value`. Here `value` is a list with one number per run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from hpctrain.bench.scaling.sweep import PARTS, ScalingDocument, ScalingRun
from hpctrain.errors import UsageError
from hpctrain.telemetry import OPTIONAL_KEYS

EXTRAP_SIZES = 5  # the numbers of ranks that Extra-P's modeler asks for


def extrap_lines(document: ScalingDocument) -> list[str]:
    """Returns the lines of the file: one line per number of ranks and part of a step, with one value per run.

    The callpath is `step` for the whole step and `step->NAME` for a part. The parameter `p` is the number of ranks. A
    value is seconds per step: for a part, the mean over the run's ranks and measured steps; for `step`, the mean over
    the measured steps of the slowest rank's time.

    Raises UsageError if the sweep compares splits, where `p` would not be the only parameter.
    """
    if document.settings.cores is not None:
        raise UsageError(
            "the document has splits of the same cores into ranks and threads, which Extra-P cannot model over the "
            "number of ranks: measure with --ranks, without --split-cores"
        )
    by_ranks: dict[int, list[ScalingRun]] = {}
    for run in document.runs:
        by_ranks.setdefault(run.ranks, []).append(run)
    return [
        json.dumps({"params": {"p": ranks}, "callpath": callpath, "metric": "time", "value": values})
        for ranks, runs in sorted(by_ranks.items())
        for callpath, values in _values(runs)
    ]


def extrap_notes(document: ScalingDocument) -> list[str]:
    """Returns notes for a user who fits a model with Extra-P; empty if there is nothing to note."""
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
