"""Implementation of `hpctrain bench step`: from the recipe to the table and the JSON document."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from hpctrain.bench.document import document_head, write_document
from hpctrain.bench.step.measure import StepRow, measure_steps, rows_of, runs_as_json
from hpctrain.bench.step.plan import StepAsked
from hpctrain.bench.step.resources import scratch_folder, shares_cores, threads_of_a_rank
from hpctrain.bench.step.run import HowToRun, StepRun
from hpctrain.bench.step.table import step_table
from hpctrain.launch import Launcher, survey_machine
from hpctrain.run import Recipe, working_commit

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
    """Performs the runs. Returns the table of results; writes the JSON document if `json_path` is given."""
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
    place = scratch or scratch_folder(recipe, shared=bool(os.environ.get("SLURM_JOB_ID")))
    runs = measure_steps(recipe, asked, how=how, scratch=place)
    rows = rows_of(asked, runs, batch=recipe.data.global_batch)
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
    """JSON document of `--json`; docs/guides/benchmarks.md describes its fields."""
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
