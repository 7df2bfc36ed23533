"""The implementation of `hpctrain bench step`, from the recipe to the table and the JSON document."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hpctrain.bench.document import document_head, write_document
from hpctrain.bench.figures import Spread, describe_ms, describe_spread, empty_table, show_number, spread_of
from hpctrain.bench.step.plan import (
    ScalingKind,
    StepAsked,
    StepCell,
    cells_of,
    order_of_runs,
    runs_folder,
    shares_cores,
    threads_of_a_rank,
)
from hpctrain.bench.step.run import HowToRun, StepRun, run_once
from hpctrain.errors import LaunchError
from hpctrain.launch import Launcher, survey_machine
from hpctrain.run import Recipe, working_commit

# Measures training steps by number of ranks: samples/s, efficiency, exposed communication.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """A row of the table. Each spread is over the runs, except `step_s`, which is over all measured steps of all runs.

    efficiency: samples/s per rank, divided by samples/s per rank with `baseline_ranks` ranks.
    exposed_s: seconds per step for which a rank is blocked by communication, as the mean over steps and ranks.
    """

    mode: ScalingKind
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
    """Makes all runs, one after another, and prints a line to stderr for each.

    scratch: a folder visible on all nodes. The runs' directories are made in it and removed afterwards.

    Raises UsageError before the first run if a configuration is impossible, LaunchError if `scratch` cannot be written,
    and the errors of `run_once`.
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


def rows_of_runs(asked: StepAsked, runs: Sequence[StepRun], *, batch: int) -> list[StepRow]:
    """Returns one row per mode and number of ranks. `batch` is the recipe's global batch."""
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
    """Returns all runs in the order in which they were made.

    Only the first run of each configuration has its environment; in all other runs the environment is None.
    """
    reported: set[StepCell] = set()
    found = []
    for run in runs:
        environment = None if run.cell in reported else run.environment
        reported.add(run.cell)
        found.append({**asdict(run.cell), **run.as_json(), "environment": environment})
    return found


# Table of the step measurement.


def step_table(rows: Sequence[StepRow], *, title: str) -> Table:
    """Returns a table with one row per mode and number of ranks: medians, with quartiles if there are several runs."""
    columns = ("scaling", "ranks", "batch", "samples/s", "step, ms", "efficiency", "exposed, ms", "exposed")
    table = empty_table(title, columns, texts=("scaling",))
    for place, row in enumerate(rows):
        last = place + 1 == len(rows) or rows[place + 1].mode is not row.mode
        table.add_row(
            row.mode.value,
            str(row.cell.num_ranks),
            str(row.cell.global_batch),
            describe_spread(row.samples_per_s, show_number),
            describe_ms(row.step_s),
            f"{row.efficiency:.0%}",
            describe_ms(row.exposed_s),
            f"{row.exposed_share.median:.1%}",
            end_section=last,
        )
    return table


# Implementation of `hpctrain bench step`.


SCHEMA = "hpctrain.bench.step/1"


def bench_step(
    recipe: Recipe,
    asked: StepAsked,
    *,
    recipe_path: Path,
    ranks_per_node: int | None,
    launcher: Launcher,
    threads: int | None,
    scratch: Path | None,
    json_path: Path | None,
) -> Table:
    """Makes the runs and returns the table of results. Writes the JSON document if `json_path` is given."""
    machine = survey_machine()
    how = HowToRun(
        machine=machine,
        launcher=launcher,
        ranks_per_node=ranks_per_node,
        threads=threads
        or threads_of_a_rank(max(asked.ranks), machine=machine, ranks_per_node=ranks_per_node),
        module_folder=recipe_path.absolute().parent,
        environ=os.environ,
    )
    commit = working_commit()
    if threads is not None:
        recipe = recipe.model_copy(
            update={"run": recipe.run.model_copy(update={"threads_per_rank": threads})}
        )
    place = scratch or runs_folder(recipe, shared=bool(os.environ.get("SLURM_JOB_ID")))
    runs = measure_steps(recipe, asked, how=how, scratch=place)
    rows = rows_of_runs(asked, runs, batch=recipe.data.global_batch)
    if json_path is not None:
        write_document(json_path, _document(recipe, asked, rows, runs, how=how, commit=commit))
    _warn_of_shared_cores(asked, how=how)
    environment = max(runs, key=lambda run: run.cell).environment
    each = recipe.run.threads_per_rank or how.threads
    baseline = rows[0].baseline_ranks
    return step_table(
        rows,
        title=f"{recipe.run.name}: {asked.repeats} run{_s(asked.repeats)} of {asked.steps} steps after "
        f"{asked.warmup_steps}; {environment['backend']}, {environment['algorithm']}, {environment['wire']} on the "
        f"wire, {each} thread{_s(each)} per rank; efficiency relative to {baseline} rank{_s(baseline)}",
    )


def _s(count: int) -> str:
    return "s" if count > 1 else ""


def _warn_of_shared_cores(asked: StepAsked, *, how: HowToRun) -> None:
    if shares_cores(max(asked.ranks), machine=how.machine, ranks_per_node=how.ranks_per_node):
        print(
            f"hpctrain bench: {max(asked.ranks)} ranks shared {how.machine.num_cores} cores: the efficiency "
            "does not apply to a machine with a core for each rank",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _document(
    recipe: Recipe,
    asked: StepAsked,
    rows: list[StepRow],
    runs: list[StepRun],
    *,
    how: HowToRun,
    commit: str | None,
) -> dict[str, Any]:
    """Returns the JSON document of `--json`, whose fields docs/guides/benchmarks.md describes."""
    largest = max(runs, key=lambda run: run.cell)
    return {
        **document_head(SCHEMA, commit=commit),
        "topology": largest.environment["topology"],
        "backend": largest.environment["backend"],
        "settings": {
            "ranks": list(asked.ranks),
            "modes": [mode.value for mode in asked.modes],
            "steps": asked.steps,
            "warmup_steps": asked.warmup_steps,
            "repeats": asked.repeats,
            "seed": asked.seed,
            "threads_per_rank": recipe.run.threads_per_rank or how.threads,
            "ranks_per_node": how.ranks_per_node,
        },
        "recipe": recipe.model_dump(),
        "rows": [row.as_json() for row in rows],
        "runs": runs_as_json(runs),
    }
