"""What a scaling sweep plans, when it may be resumed, and what it makes of its runs."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hpctrain.bench.scaling.measure import check_samples, summarize_run
from hpctrain.bench.scaling.sweep import (
    PlannedRun,
    ScalingDocument,
    check_same_sweep,
    check_settings,
    plan_runs,
    ranks_of_nodes,
    read_scaling_document,
    remaining_runs,
    scaling_lines,
    scaling_table,
    sweep_cells,
)
from hpctrain.bench.step.plan import StepCell
from hpctrain.cli.bench.group import bench_app
from hpctrain.errors import DataError, LaunchError, UsageError
from tests.unit.bench.sweeps import document_of, recipe, run_of, settings, written


def amdahl(planned: PlannedRun) -> float:
    """Rates with 10% that is not shared, and noise of 2%."""
    ranks = planned.cell.num_ranks
    noise = random.Random(f"{planned.round}-{ranks}").gauss(1, 0.02)
    return 1000 * ranks / (1 + 0.1 * (ranks - 1)) * noise


def shown(document: ScalingDocument) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    console.print(scaling_table(document))
    return out.getvalue() + "\n".join(scaling_lines(document))


# ---- plan


def test_each_round_has_every_size_once_and_more_rounds_keep_the_order() -> None:
    five = plan_runs(settings((1, 2, 4, 8)), batch=64)
    assert len(five) == 20
    for number in range(5):
        round_ = [run.cell.num_ranks for run in five if run.round == number]
        assert Counter(round_) == Counter([1, 2, 4, 8])
    assert len({tuple(run.cell.num_ranks for run in five if run.round == number) for number in range(5)}) > 1
    assert [run.place for run in five] == [0, 1, 2, 3] * 5
    assert plan_runs(settings((1, 2, 4, 8), repeats=9), batch=64)[:20] == five


def test_strong_shares_the_batch_and_weak_gives_each_rank_one() -> None:
    assert [cell.global_batch for cell in sweep_cells(settings(), batch=64)] == [64, 64, 64]
    assert [cell.global_batch for cell in sweep_cells(settings(mode="weak"), batch=64)] == [64, 128, 256]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repeats": 4}, "at least 5 rounds"),
        ({"ranks": (1, 128)}, "128 ranks cannot share"),
        ({"ranks": (1, 3), "ranks_per_node": 2, "start": "jobs"}, "3 ranks do not fill nodes of 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_settings(settings(**changes), batch=64)


def test_nodes_are_counted_in_ranks() -> None:
    assert ranks_of_nodes([1, 2, 4], ranks_per_node=8) == [8, 16, 32]
    with pytest.raises(UsageError, match="how many ranks a node has"):
        ranks_of_nodes([1], ranks_per_node=None)


# ---- resuming


def test_what_is_left_is_what_has_not_been_measured() -> None:
    document = document_of(settings(), amdahl, num_runs=7)
    assert not document.complete
    left = remaining_runs(plan_runs(document.settings, batch=64), document.runs)
    assert len(left) == 8
    more = plan_runs(settings(repeats=6), batch=64)
    assert len(remaining_runs(more, document.runs)) == 11
    assert "--resume measures the rounds that are left" in shown(document)
    assert {size.repeats for size in document.sizes} <= {2, 3}


def test_a_sweep_is_resumed_only_as_it_was_begun() -> None:
    before = document_of(settings(), amdahl, num_runs=7)
    same: dict[str, Any] = {
        "settings": settings(repeats=8), "recipe": recipe().model_dump(mode="json"), "commit": "abc",
        "machine": before.machine,
    }  # fmt: skip
    check_same_sweep(before, **same)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"settings": settings(steps=9)}, "settings.steps"),
        ({"settings": settings(mode="weak")}, "settings.mode"),
        ({"recipe": recipe(seed=3).model_dump(mode="json")}, r"recipe section \[run\]"),
        ({"commit": "abd"}, "commit abc is now abd"),
        ({"machine": {**before.machine, "cores": 999}}, "machine's cores"),
    ]
    for change, words in changes:
        with pytest.raises(UsageError, match=words):
            check_same_sweep(before, **{**same, **change})


# ---- samples


def test_runs_on_other_samples_are_refused_with_their_step() -> None:
    planned = plan_runs(settings(), batch=64)[:3]
    runs = [run_of(one, rate=1000) for one in planned]
    checked = check_samples(runs, mode="strong")
    assert checked is not None
    assert (checked.runs, checked.steps) == (3, 4)
    other = runs[2].model_copy(update={"sample_sums": [*runs[2].sample_sums[:2], "ff" * 8, "00" * 8]})
    with pytest.raises(DataError, match="they differ in measured step 3"):
        check_samples([*runs[:2], other], mode="strong")
    assert check_samples([*runs[:2], other], mode="weak") is not None  # another number of ranks
    again = planned[2].__class__(round=1, place=0, cell=planned[2].cell)
    with pytest.raises(DataError, match="round 2"):
        check_samples([*runs, run_of(again, rate=1000, sums="01")], mode="weak")
    assert check_samples([], mode="weak") is None


def test_records_become_a_run() -> None:
    planned = PlannedRun(round=2, place=1, cell=StepCell(num_ranks=2, global_batch=10))
    steps = [
        [
            {"samples": 5, "sample_sum": f"{rank + 1:016x}", "seconds": {"step": 1.0 + rank, "compute": 0.5}},
            {"samples": 5, "sample_sum": "f" * 16, "seconds": {"step": 2.0 - rank, "compute": 0.5, "own_write": 0.1}},
        ]
        for rank in range(2)
    ]  # fmt: skip
    environment = {
        "ranks": [{"host": "a", "node": "n0"}, {"host": "b", "node": "n1"}], "node_names": ["n0", "n1"],
    }  # fmt: skip
    how: dict[str, Any] = {"environment": environment, "started": 1.0, "ended": 9.0, "job": None}
    run = summarize_run(planned, steps, with_environment=False, **how)
    assert (run.step_s, run.samples, run.samples_per_s, run.nodes) == ([2.0, 2.0], 20, 5.0, 2)
    assert run.sample_sums == ["0" * 15 + "3", "f" * 15 + "e"]
    assert run.by_rank[1].host == "b"
    assert run.by_rank[1].seconds == {"step": 3.0, "compute": 1.0, "own_write": 0.1}
    assert run.environment is None
    del steps[0][0]["sample_sum"]
    with pytest.raises(LaunchError, match="another version"):
        summarize_run(planned, steps, with_environment=True, **how)


# ---- results


def test_efficiency_is_of_the_same_rounds_and_has_an_interval() -> None:
    document = document_of(settings((1, 2, 4, 8)), amdahl)
    by_ranks = {size.ranks: size for size in document.sizes}
    assert by_ranks[1].efficiency["value"] == 1
    assert by_ranks[1].efficiency["low"] is None
    for ranks in (2, 4, 8):
        efficiency = by_ranks[ranks].efficiency
        assert efficiency["low"] < 1 / (1 + 0.1 * (ranks - 1)) < efficiency["high"]
        assert by_ranks[ranks].speedup["value"] == pytest.approx(efficiency["value"] * ranks)
        assert efficiency["count"] == 5
    assert by_ranks[2].seconds["exposed_sync"] == pytest.approx(0.2 * by_ranks[2].seconds["step"])
    assert by_ranks[2].seconds["other"] == pytest.approx(0.1 * by_ranks[2].seconds["step"])
    assert [size.shared_cores for size in document.sizes] == [False, False, True, True]
    assert document.fits is not None
    assert document.fits["chosen"] == "Amdahl"
    text = shown(document)
    assert (
        "strong scaling, 5 interleaved rounds of 4 steps after 2; relative to 1 rank, [95% t interval]"
        in text
    )
    assert "* Amdahl: S = N / (1 + sigma (N - 1)); sigma = 0.1" in text
    assert "beyond what was measured, if it holds there: efficiency" in text
    assert "every run had the same samples in each step" in text


def test_without_one_rank_the_smallest_size_is_the_baseline() -> None:
    document = document_of(settings((2, 4), mode="weak"), lambda planned: 500.0 * planned.cell.num_ranks)
    assert document.baseline_ranks == 2
    assert document.sizes[1].efficiency["value"] == pytest.approx(1)
    assert "weak scaling" in shown(document)
    assert "relative to 2 ranks" in shown(document)


# ---- document


def test_a_document_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    document = document_of(settings(), amdahl)
    path = written(tmp_path / "scaling.json", document)
    assert read_scaling_document(path).as_json() == document.as_json()
    assert json.loads(path.read_text())["schema"] == "hpctrain.bench.scaling/1"


def test_another_file_is_not_taken_for_a_document(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    with pytest.raises(UsageError, match="No such file"):
        read_scaling_document(path)
    for text in ("", "[]", '{"schema": "hpctrain.bench.scaling/2"}', "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(UsageError, match="is not a document of `hpctrain bench scaling`"):
            read_scaling_document(path, option="--json")


RECIPE = """
[run]
name = "mine"
directory = "runs/mine"
epochs = 1

[task]
target = "mine:Mine"

[data]
train = "data/train"
global_batch = 64
"""


def test_nothing_is_started_over_an_unfinished_sweep(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    path = written(tmp_path / "scaling.json", document_of(settings(), amdahl, num_runs=7))
    words = ["scaling", str(tmp_path / "recipe.toml"), "--json", str(path)]
    before = path.read_bytes()
    refused = CliRunner().invoke(bench_app, words)
    assert isinstance(refused.exception, UsageError)
    assert "unfinished sweep of 7 runs: continue it with --resume" in str(refused.exception)
    changed = CliRunner().invoke(bench_app, [*words, "--resume", "--steps", "9"])
    assert isinstance(changed.exception, UsageError)
    assert "--resume: the options differ from those of the runs so far" in str(changed.exception)
    both = CliRunner().invoke(bench_app, [*words, "--ranks", "1", "--nodes", "1"])
    assert "give one of them" in str(both.exception)
    jobs = CliRunner().invoke(bench_app, [*words, "--jobs"])
    assert "no section [slurm]" in str(jobs.exception)
    assert path.read_bytes() == before
