"""What a step measurement plans, and what it makes of the runs' records."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpctrain.bench.step.measure import StepRow, rows_of_runs, runs_as_json, step_table
from hpctrain.bench.step.plan import (
    ScalingKind,
    StepAsked,
    StepCell,
    cells_of,
    order_of_runs,
    parse_modes,
    parse_ranks,
    recipe_of,
)
from hpctrain.bench.step.run import StepRun, read_step_records
from hpctrain.errors import LaunchError, UsageError
from hpctrain.run import Recipe, load_recipe, parse_recipe
from hpctrain.run.recipe.load import to_toml

BOTH = (ScalingKind.STRONG, ScalingKind.WEAK)


def asked(
    ranks: tuple[int, ...] = (1, 2, 4), modes: tuple[ScalingKind, ...] = BOTH, **changes: int
) -> StepAsked:
    return StepAsked(ranks=ranks, modes=modes, **{"steps": 4, "warmup_steps": 2, "repeats": 2, **changes})  # type: ignore[arg-type]


def recipe(**run: Any) -> Recipe:
    return parse_recipe(
        {
            "run": {"directory": "runs/mine", "epochs": 3, "ranks": 4, **run},
            "task": {"target": "mine:Mine", "options": {"width": 8}},
            "data": {"train": "data/train", "held_out": "data/test", "global_batch": 64},
            "checkpoint": {"every_steps": 1, "every_minutes": 0.1, "directory": "runs/precious"},
            "telemetry": {"metrics_every_steps": 10, "evaluate_every_steps": 5},
        }
    )


def run_of(cell: StepCell, *, step_s: float, exposed_s: float = 0.0) -> StepRun:
    return StepRun(
        cell=cell,
        step_s=(step_s,) * 4,
        exposed_s=(exposed_s,) * 4,
        samples=(cell.global_batch,) * 4,
        environment={"topology": f"1 node x {cell.num_ranks}"},
    )


def test_strong_shares_the_batch_and_weak_gives_each_rank_one() -> None:
    cells = {(c.num_ranks, c.global_batch) for c in cells_of(asked(), batch=64)}
    assert cells == {(1, 64), (2, 64), (4, 64), (2, 128), (4, 256)}  # one rank is the same in both


def test_a_batch_that_cannot_be_shared_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="4 ranks cannot share the recipe's global batch of 3"):
        cells_of(asked(), batch=3)
    assert len(cells_of(asked(modes=(ScalingKind.WEAK,)), batch=3)) == 3


def test_every_round_runs_every_cell_once_in_an_order_of_its_own() -> None:
    cells = cells_of(asked(ranks=(1, 2, 4, 8)), batch=64)
    order = order_of_runs(cells, repeats=6, seed=1)
    rounds = [order[begin : begin + len(cells)] for begin in range(0, len(order), len(cells))]
    assert all(Counter(round_) == Counter(cells) for round_ in rounds)
    assert len({tuple(round_) for round_ in rounds}) > 1
    assert order == order_of_runs(cells, repeats=6, seed=1)


def test_the_users_own_run_is_not_touched() -> None:
    mine = recipe()
    cell = StepCell(num_ranks=2, global_batch=128)
    changed = recipe_of(mine, cell, directory=Path("/tmp/somewhere"), steps=6, threads=3)
    assert changed.run.directory == "/tmp/somewhere"
    assert (changed.run.steps, changed.run.epochs, changed.run.ranks) == (6, None, None)
    assert changed.data.global_batch == 128
    assert changed.data.held_out is None
    assert (changed.checkpoint.every_steps, changed.checkpoint.every_minutes) == (None, None)
    assert changed.checkpoint.directory is None
    assert changed.telemetry.metrics_every_steps == 1
    assert changed.run.threads_per_rank == 3
    assert changed.task == mine.task
    assert changed.optimizer == mine.optimizer
    assert changed.reduction == mine.reduction


def test_the_measured_recipe_is_a_valid_one(tmp_path: Path) -> None:
    changed = recipe_of(
        recipe(threads_per_rank=5),
        StepCell(num_ranks=1, global_batch=8),
        directory=tmp_path,
        steps=6,
        threads=3,
    )
    assert changed.run.threads_per_rank == 5  # the recipe's own word counts
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(changed))
    assert load_recipe(path) == changed


def test_efficiency_is_the_rate_of_a_rank_against_one_rank() -> None:
    what = asked(ranks=(1, 2))
    cells = {(1, 64): 0.1, (2, 64): 0.08, (2, 128): 0.125}
    runs = [
        run_of(StepCell(num_ranks=n, global_batch=b), step_s=s, exposed_s=0.25 * s)
        for (n, b), s in cells.items()
        for _ in range(2)
    ]
    rows = {(row.mode, row.cell.num_ranks): row for row in rows_of_runs(what, runs, batch=64)}
    assert rows[ScalingKind.STRONG, 1].efficiency == 1 == rows[ScalingKind.WEAK, 1].efficiency
    assert rows[ScalingKind.STRONG, 2].samples_per_s.median == pytest.approx(800)
    assert rows[ScalingKind.STRONG, 2].efficiency == pytest.approx(0.1 / 0.08 / 2)
    assert rows[ScalingKind.WEAK, 2].efficiency == pytest.approx(0.1 / 0.125)
    assert rows[ScalingKind.WEAK, 2].exposed_share.median == pytest.approx(0.25)
    assert rows[ScalingKind.WEAK, 2].exposed_s.median == pytest.approx(0.25 * 0.125)
    assert rows[ScalingKind.WEAK, 2].step_s.count == 8
    assert_shown(list(rows.values()))
    documents = runs_as_json(runs)
    assert [d["environment"] is not None for d in documents] == [True, False] * 3
    assert json.loads(json.dumps(documents))[0]["step_s"] == [0.1] * 4


def assert_shown(rows: list[StepRow]) -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(step_table(rows, title="mine"))
    text = out.getvalue()
    assert "exposed, ms" in text
    assert sum(line.startswith("│ strong") for line in text.splitlines()) == 2
    assert "62%" in text


def test_without_one_rank_the_least_number_is_the_baseline() -> None:
    what = asked(ranks=(2, 4), modes=(ScalingKind.STRONG,))
    runs = [run_of(StepCell(num_ranks=n, global_batch=64), step_s=s) for n, s in ((2, 0.1), (4, 0.1))]
    row = rows_of_runs(what, runs, batch=64)[1]
    assert (row.baseline_ranks, row.efficiency) == (2, pytest.approx(0.5))


def write_records(directory: Path, *, ranks: int, steps: int) -> None:
    (directory / "metrics").mkdir(parents=True)
    (directory / "environment.json").write_text('{"topology": "1 node x 2 ranks"}')
    for rank in range(ranks):
        lines = [
            {"kind": "step", "step": s, "samples": 3 + rank, "seconds": {"step": s + rank, "exposed_sync": 0.5 * rank}}
            for s in range(1, steps + 1)
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "checkpoint", "step": steps}])
        (directory / "metrics" / f"rank-{rank:05}.jsonl").write_text(text)


def test_a_step_takes_as_long_as_its_slowest_rank_and_warm_up_does_not_count(tmp_path: Path) -> None:
    write_records(tmp_path, ranks=2, steps=5)
    run = read_step_records(tmp_path, StepCell(num_ranks=2, global_batch=7), first_step=3, last_step=5)
    assert run.step_s == (4, 5, 6)
    assert run.exposed_s == (0.25, 0.25, 0.25)
    assert run.samples == (7, 7, 7)
    assert run.samples_per_s == pytest.approx(21 / 15)


def test_records_that_are_not_there_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    write_records(tmp_path, ranks=2, steps=5)
    with pytest.raises(LaunchError, match="--scratch a folder that all nodes share"):
        read_step_records(tmp_path, StepCell(num_ranks=3, global_batch=7), first_step=3, last_step=5)
    with pytest.raises(LaunchError, match="rank 0 did not record step 6"):
        read_step_records(tmp_path, StepCell(num_ranks=2, global_batch=7), first_step=3, last_step=6)


def test_ranks_and_modes_are_lists() -> None:
    assert parse_ranks("4, 1,2,2") == (1, 2, 4)
    assert parse_modes("weak,strong,weak") == (ScalingKind.WEAK, ScalingKind.STRONG)
    for text in ("", "0", "1,,2", "one", "-1", "1.5"):
        with pytest.raises(UsageError, match="1,2,4"):
            parse_ranks(text)
    with pytest.raises(UsageError, match="no 'week'; choose strong, weak"):
        parse_modes("week")
    for change in ({"steps": 0}, {"warmup_steps": -1}, {"repeats": 0}):
        with pytest.raises(UsageError, match="at least 1 step"):
            asked(**change)
