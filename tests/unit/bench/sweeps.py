"""Sweeps as `hpctrain bench scaling` writes them, made from rates: for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from hpctrain.bench.document import document_head
from hpctrain.bench.scaling.measure import check_samples
from hpctrain.bench.scaling.results import fits_of, size_results
from hpctrain.bench.scaling.splits import judge_splits
from hpctrain.bench.scaling.sweep import (
    SCHEMA,
    FailedSplit,
    PlannedRun,
    RankSums,
    ScalingDocument,
    ScalingRun,
    SweepSettings,
    plan_runs,
    remaining_runs,
    write_scaling_document,
)
from hpctrain.run import Recipe, parse_recipe

STEPS = 4


def recipe(**run: Any) -> Recipe:
    return parse_recipe(
        {
            "run": {"name": "mine", "directory": "runs/mine", "epochs": 3, **run},
            "task": {"target": "mine:Mine"},
            "data": {"train": "data/train", "global_batch": 64},
        }
    )


def settings(
    ranks: Sequence[int] = (1, 2, 4),
    *,
    mode: Literal["strong", "weak"] = "strong",
    repeats: int = 5,
    **changes: Any,
) -> SweepSettings:
    return SweepSettings(
        mode=mode, ranks=list(ranks), repeats=repeats, **{"steps": STEPS, "warmup_steps": 2, "seed": 0, **changes}
    )  # fmt: skip


def run_of(planned: PlannedRun, *, rate: float, started: float = 0.0, sums: str = "00") -> ScalingRun:
    """A run whose ranks take equal shares of a step: 10% input, 60% compute, 20% communication."""
    cell = planned.cell
    step_s = cell.global_batch / rate
    parts = {"step": 1.0, "input": 0.1, "compute": 0.6, "exposed_sync": 0.2, "checkpoint": 0.0, "sync": 0.3}
    return ScalingRun(
        round=planned.round, place=planned.place, ranks=cell.num_ranks, nodes=1, global_batch=cell.global_batch,
        started=started, ended=started + 1, samples_per_s=rate, step_s=[step_s] * STEPS,
        samples=cell.global_batch * STEPS, sample_sums=[f"{sums}{step:014x}" for step in range(STEPS)],
        by_rank=[
            RankSums(
                rank=rank, host="here", node="here", samples=cell.global_batch * STEPS // cell.num_ranks,
                seconds={name: STEPS * step_s * share for name, share in parts.items()},
            )
            for rank in range(cell.num_ranks)
        ],
    )  # fmt: skip


def document_of(
    asked: SweepSettings,
    rate: Callable[[PlannedRun], float],
    *,
    start_of_round: Callable[[int], float] = lambda number: 100.0 * number,
    num_runs: int | None = None,
    failed: FailedSplit | None = None,
) -> ScalingDocument:
    """rate: of each run. start_of_round: seconds since 1970. num_runs: made so far; None: all.

    failed: a split whose first run failed.
    """
    mine = recipe()
    planned = plan_runs(asked, batch=64)
    runs = [
        run_of(one, rate=rate(one), started=start_of_round(one.round) + 2 * one.place)
        for one in planned[:num_runs]
        if failed is None or one.cell.num_ranks != failed.ranks
    ]
    baseline = min(ranks for ranks in asked.ranks if failed is None or ranks != failed.ranks)
    fits = fits_of(runs, mode=asked.mode) if asked.cores is None else None
    rates = {
        ranks: {run.round: run.samples_per_s for run in runs if run.ranks == ranks} for ranks in asked.ranks
    }
    verdict = judge_splits(
        rates, settings=asked, failed=[] if failed is None else [failed], recipe="recipe.toml"
    )
    return ScalingDocument(
        **document_head(SCHEMA, commit="abc"), complete=not remaining_runs(planned, runs), recipe_path="recipe.toml",
        recipe=mine.model_dump(mode="json"), settings=asked, baseline_ranks=baseline,
        samples=check_samples(runs, mode=asked.mode),
        sizes=size_results(runs, baseline_ranks=baseline, shared=lambda ranks: ranks > 2),
        fits=None if fits is None else fits.as_json(), runs=runs, notes=[],
        splits=None if asked.cores is None else verdict,
    )  # fmt: skip


def written(path: Path, document: ScalingDocument) -> Path:
    write_scaling_document(path, document)
    return path
