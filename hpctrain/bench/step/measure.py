"""Measures training steps by number of ranks: samples/s, efficiency, exposed communication."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.bench.spread import Spread, spread_of
from hpctrain.bench.step.plan import Scaling, StepAsked, StepCell, cells_of, order_of_runs
from hpctrain.bench.step.run import HowToRun, StepRun, run_once
from hpctrain.errors import LaunchError
from hpctrain.run import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """A line of the table. Spreads are over the runs; step_s is over all measured steps of all runs.

    efficiency: samples/s per rank, divided by samples/s per rank with `baseline_ranks` ranks.
    exposed_s: seconds per step in which a rank is blocked by communication, mean over steps and ranks.
    """

    mode: Scaling
    cell: StepCell
    samples_per_s: Spread
    step_s: Spread
    exposed_s: Spread
    exposed_share: Spread
    efficiency: float
    baseline_ranks: int

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode.value,
            "ranks": self.cell.num_ranks,
            "global_batch": self.cell.global_batch,
            "samples_per_s": self.samples_per_s.as_json(),
            "step_s": self.step_s.as_json(),
            "exposed_s": self.exposed_s.as_json(),
            "exposed_share": self.exposed_share.as_json(),
            "efficiency": self.efficiency,
            "baseline_ranks": self.baseline_ranks,
        }


def measure_steps(recipe: Recipe, asked: StepAsked, *, how: HowToRun, scratch: Path) -> list[StepRun]:
    """Performs all runs, one after another, and prints a line to stderr for each.

    scratch: a folder visible on all nodes, for the runs' directories, which are removed afterwards.
    Raises UsageError before the first run if a configuration is impossible, LaunchError if `scratch` cannot be
    written, and the errors of `run_once`.
    """
    order = order_of_runs(
        cells_of(asked, batch=recipe.data.global_batch), repeats=asked.repeats, seed=asked.seed
    )
    runs: list[StepRun] = []
    try:
        place = tempfile.TemporaryDirectory(
            prefix=".hpctrain-bench-", dir=scratch, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise LaunchError(
            f"{scratch} cannot be written ({error.strerror}): give --scratch a folder that all nodes share"
        ) from error
    with place as directory:
        for number, cell in enumerate(order, start=1):
            started_s = time.monotonic()
            reported = f"run {number}/{len(order)}: {_describe(cell)}"
            run = run_once(
                recipe, cell, how=how, directory=Path(directory) / f"run-{number}", steps=asked.steps,
                warmup_steps=asked.warmup_steps,
            )  # fmt: skip
            runs.append(run)
            print(
                f"{reported}: {run.samples_per_s:,.0f} samples/s, {run.exposed_share:.0%} exposed "
                f"({time.monotonic() - started_s:.0f} s)",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    return runs


def _describe(cell: StepCell) -> str:
    return f"{cell.num_ranks} rank{'s' if cell.num_ranks > 1 else ''}, global batch {cell.global_batch}"


def rows_of(asked: StepAsked, runs: Sequence[StepRun], *, batch: int) -> list[StepRow]:
    """Returns a row for each mode and number of ranks, from the runs of its cell. batch: the recipe's global batch."""
    by_cell: dict[StepCell, list[StepRun]] = {}
    for run in runs:
        by_cell.setdefault(run.cell, []).append(run)
    rows = []
    for mode in asked.modes:
        baseline = asked.cell(mode, min(asked.ranks), batch=batch)
        per_rank = _median_rate(by_cell, baseline) / baseline.num_ranks
        for num_ranks in asked.ranks:
            cell = asked.cell(mode, num_ranks, batch=batch)
            found = by_cell[cell]
            rows.append(
                StepRow(
                    mode=mode,
                    cell=cell,
                    samples_per_s=spread_of([run.samples_per_s for run in found]),
                    step_s=spread_of([seconds for run in found for seconds in run.step_s]),
                    exposed_s=spread_of([sum(run.exposed_s) / len(run.exposed_s) for run in found]),
                    exposed_share=spread_of([run.exposed_share for run in found]),
                    efficiency=_median_rate(by_cell, cell) / num_ranks / per_rank,
                    baseline_ranks=baseline.num_ranks,
                )
            )
    return rows


def _median_rate(by_cell: Mapping[StepCell, Sequence[StepRun]], cell: StepCell) -> float:
    return spread_of([run.samples_per_s for run in by_cell[cell]]).median


def runs_as_json(runs: Sequence[StepRun]) -> list[dict[str, Any]]:
    """All runs in the order in which they were made, with the environment of the first run of each cell."""
    reported: set[StepCell] = set()
    found = []
    for run in runs:
        environment = None if run.cell in reported else run.environment
        reported.add(run.cell)
        found.append({**asdict(run.cell), **run.as_json(), "environment": environment})
    return found
