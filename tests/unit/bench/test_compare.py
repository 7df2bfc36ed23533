"""`hpctrain bench compare`: exit codes, which documents belong together, and what it warns of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpctrain.bench.compare import alternate, read_rounds
from hpctrain.bench.scaling.sweep import PlannedRun
from hpctrain.cli.bench.group import bench_app
from hpctrain.errors import UsageError
from tests.unit.bench.sweeps import document_of, settings, written

REPEATS = 8


def rates(name: str, *, factor: float = 1.0) -> Callable[[PlannedRun], float]:
    def rate(planned: PlannedRun) -> float:
        noise = random.Random(f"{name}-{planned.round}-{planned.cell.num_ranks}").gauss(0, 0.03)
        return factor * 1000 * planned.cell.num_ranks * (1 + noise)

    return rate


def sweep(
    directory: Path, name: str, *, factor: float = 1.0, first_s: float = 0.0, repeats: int = REPEATS
) -> Path:
    """A document whose rounds begin at `first_s`, `first_s + 100`, ... and last less than 10 s."""
    document = document_of(
        settings(repeats=repeats),
        rates(name, factor=factor),
        start_of_round=lambda number: first_s + 100 * number,
    )
    return written(directory / f"{name}.json", document)


def compare(*words: str | Path) -> Result:
    return CliRunner().invoke(bench_app, ["compare", *map(str, words)])


def test_a_slowdown_ends_with_1_and_is_named(tmp_path: Path) -> None:
    old, new = sweep(tmp_path, "old"), sweep(tmp_path, "new", factor=0.9, first_s=50)
    found = compare(old, new)
    assert found.exit_code == 1
    assert "measured in turns; permutation test over all 256 arrangements" in found.output
    assert "fell by more than noise" in found.output
    assert "all by" in found.output
    assert compare(old, new, "--threshold", "0.3").exit_code == 0
    document = json.loads(compare(old, new, "--json").output)
    assert document["schema"] == "hpctrain.bench.compare/1"
    assert "all" in document["fell"]
    assert document["paired"] is True
    assert [figure["name"] for figure in document["figures"]] == [
        "1 rank, batch 64, strong", "2 ranks, batch 64, strong", "4 ranks, batch 64, strong", "all",
    ]  # fmt: skip


def test_noise_and_a_speedup_end_with_0(tmp_path: Path) -> None:
    old = sweep(tmp_path, "old")
    same = compare(old, sweep(tmp_path, "same", first_s=50))
    assert (same.exit_code, "nothing fell by more than its noise" in same.output) == (0, True)
    faster = compare(old, sweep(tmp_path, "faster", factor=1.2, first_s=50))
    assert (faster.exit_code, "rose" in faster.output) == (0, True)


def test_one_after_the_other_is_said_and_not_paired(tmp_path: Path) -> None:
    old, new = sweep(tmp_path, "old"), sweep(tmp_path, "new", factor=0.9, first_s=5000)
    found = compare(old, new)
    assert found.exit_code == 1
    assert "not measured in turns" in found.output
    assert "a change of the machine in between looks like a change of the code" in found.output
    assert not alternate(read_rounds(old), read_rounds(new))
    assert alternate(read_rounds(old), read_rounds(sweep(tmp_path, "turns", first_s=50)))
    assert not alternate(read_rounds(old), read_rounds(sweep(tmp_path, "fewer", first_s=50, repeats=5)))
    # Three old rounds, then three new ones: not in turns, though no two overlap.
    assert not alternate(read_rounds(old), read_rounds(sweep(tmp_path, "blocks", first_s=250)))


def test_documents_of_bench_step_are_read_too(tmp_path: Path) -> None:
    def steps(name: str, factor: float) -> Path:
        runs = [
            {"num_ranks": n, "global_batch": 64, "samples_per_s": factor * 100 * n * (1 + 0.001 * number)}
            for number in range(5)
            for n in (2, 1)
        ]
        machine = {"host": "a", "cpu": "b", "cores": 2}
        document = {
            "schema": "hpctrain.bench.step/1", "commit": name, "machine": machine, "recipe": {},
            "settings": {"steps": 4, "warmup_steps": 2}, "runs": runs,
        }  # fmt: skip
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document))
        return path

    found = compare(steps("a", 1.0), steps("b", 0.8), "--json")
    assert found.exit_code == 1
    assert set(json.loads(found.output)["fell"]) == {"1 rank, batch 64", "2 ranks, batch 64", "all"}


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    old = sweep(tmp_path, "old")
    weak = written(tmp_path / "weak.json", document_of(settings(mode="weak"), rates("weak")))
    unfinished = written(tmp_path / "unfinished.json", document_of(settings(), rates("x"), num_runs=4))
    other = tmp_path / "other.json"
    other.write_text('{"schema": "hpctrain.bench.data/1"}')
    torn = tmp_path / "torn.json"
    torn.write_text('{"schema": ')
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"schema": "hpctrain.bench.scaling/1", "runs": []}')
    for path, words in (
        (weak, "no size in common"),
        (unfinished, "each needs at least two"),
        (other, "of schema hpctrain.bench.data/1"),
        (torn, "not a document of `hpctrain bench`"),
        (damaged, "is damaged"),
        (tmp_path / "none.json", "No such file"),
    ):
        error = compare(old, path).exception
        assert isinstance(error, UsageError), path
        assert words in str(error)


def test_what_makes_the_figures_doubtful_is_noted(tmp_path: Path) -> None:
    old = sweep(tmp_path, "old")
    document = document_of(settings((1, 2, 8), repeats=REPEATS), rates("new"))
    changed = document.model_copy(
        update={
            "machine": {**document.machine, "host": "elsewhere"},
            "recipe": {**document.recipe, "reduction": {"algorithm": "ring"}},
        }
    )
    found = compare(old, written(tmp_path / "new.json", changed)).output
    assert "only one of the two has: 4 ranks, batch 64, strong; 8 ranks, batch 64, strong" in found
    assert "they differ in more than the code: the machine's host, recipe section [reduction]" in found
    assert "both measured commit abc" in found


@pytest.mark.parametrize("rounds", [2, 4])
def test_too_few_rounds_are_said_to_show_nothing(tmp_path: Path, rounds: int) -> None:
    paths = []
    for name, factor, first_s in (("old", 1.0, 0), ("new", 0.5, 5000)):
        document = document_of(
            settings(), rates(name, factor=factor), num_runs=3 * rounds,
            start_of_round=lambda number, first_s=first_s: first_s + 100.0 * number,
        )  # fmt: skip
        paths.append(written(tmp_path / f"{name}.json", document))
    found = compare(*paths)
    if rounds == 2:
        assert found.exit_code == 0
        assert "cannot show any decrease: the smallest possible p is" in found.output
    else:
        assert found.exit_code == 1  # four against four, not in turns: 1 of 70
