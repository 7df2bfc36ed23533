"""The step benchmark's choices, ratios, records and page; nothing is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results_file
from benchmarks.step.peer_loop import parameter_groups
from benchmarks.step.runs import (
    RECIPES,
    Found,
    StepRecords,
    launch_words,
    plain,
    samples_per_s,
    samples_per_s_apart,
    user_environment,
)
from benchmarks.step.suite import NotMeasured, best_of, failed_record, paired, records_of, tables
from benchmarks.step.variants import (
    ALONE,
    BEST_DDP,
    CELLS,
    DEFAULT,
    FLAT,
    ONE_RANK,
    ONE_THREAD,
    PEER,
    YIELDING_PEER,
    candidates,
    companions,
    decided,
    default_of,
    finalists,
)
from hpctrain.run.recipe.load import load_recipe
from tests.ranks_launcher import REPOSITORY

DIGITS = CELLS["digits-2"]
SCREENING = {
    DEFAULT: 100.0, "mpi/ring": 90.0, "mpi/hierarchical": 101.0, "horovod/hierarchical": 60.0, "horovod/flat": 95.0,
    FLAT: 97.0, PEER: 80.0, YIELDING_PEER: 99.0, ONE_RANK: 70.0, ONE_THREAD: 55.0, ALONE: 102.0,
}  # fmt: skip
ROUND = {
    DEFAULT: 99.0, "mpi/hierarchical": 100.0, "horovod/flat": 90.0, "horovod/hierarchical": 96.0, FLAT: 95.0,
    PEER: 70.0, YIELDING_PEER: 76.0, BEST_DDP: 88.0, ONE_RANK: 66.0, ONE_THREAD: 55.0, ALONE: 105.0,
}  # fmt: skip


def found_of(**changes: Any) -> Found:
    made = {
        "rate": None,
        "screening": SCREENING,
        "rounds": [ROUND, ROUND, ROUND],
        "runs": {DEFAULT: "mpi, hierarchical, fp16"},
        "started": {DEFAULT: "mpirun -n 2 hpctrain train examples/digits.toml", PEER: "mpirun -np 2 python"},
        "variables": {DEFAULT: {"OMP_NUM_THREADS": "1"}},
        **changes,
    }
    return Found(**made)


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_every_variant_is_a_recipe_that_can_be_run_and_touches_nothing_else(cell: Any) -> None:
    """Overrides name backend, algorithm, and saves; the recipes name the algorithm that the cells say."""
    path = REPOSITORY / RECIPES[cell.recipe]
    recipe = load_recipe(path)
    assert recipe.reduction.algorithm == cell.own
    assert cell.steps % (recipe.checkpoint.every_steps or 1) == 0
    everyone = [default_of(cell), *candidates(cell), *companions(cell)]
    assert len({variant.name for variant in everyone}) == len(everyone)
    for variant in everyone:
        load_recipe(path, overrides=variant.overrides)
        keys = {override.partition("=")[0] for override in variant.overrides}
        assert keys <= {"run.backend", "reduction.algorithm", "checkpoint.every_steps"}
        assert ("checkpoint.every_steps" in keys) == (variant.name == FLAT)
    assert default_of(cell).overrides == ()


def test_all_backends_and_algorithms_that_a_recipe_can_name_are_candidates() -> None:
    names = {variant.name for variant in candidates(CELLS["digits-4x2"])}
    algorithms = ["auto", "flat", "ring", "direct", "hierarchical", "hierarchical-ring", "hierarchical-flat"]
    assert names == {f"{backend}/{name}" for backend in ("mpi", "horovod") for name in algorithms}
    assert {variant.name for variant in candidates(CELLS["digits-1"])} == {"serial", "mpi", "horovod"}


def test_the_default_the_two_best_and_what_the_figures_need_go_on_to_the_rounds() -> None:
    assert finalists(DIGITS, SCREENING) == ["mpi/hierarchical", "horovod/flat"]
    assert decided(DIGITS, SCREENING) == [
        DEFAULT, "mpi/hierarchical", "horovod/flat", FLAT, PEER, YIELDING_PEER, ALONE, ONE_RANK, ONE_THREAD,
        "horovod/hierarchical",
    ]  # fmt: skip
    without = {name: rate for name, rate in SCREENING.items() if name not in (PEER, "mpi/hierarchical")}
    assert finalists(DIGITS, without) == ["horovod/flat", "mpi/ring"]
    assert PEER not in decided(DIGITS, without)


def test_ratios_are_of_the_same_round() -> None:
    rounds = [{"a": 10.0, "b": 20.0}, {"a": 30.0, "b": 40.0}, {"a": 5.0, "b": 5.0}]
    assert paired(rounds, of="a", to="b") == [0.5, 0.75, 1.0]
    with pytest.raises(NotMeasured, match="no samples/s in every round of: b"):
        paired([*rounds, {"a": 1.0}], of="a", to="b")
    assert best_of([{"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 2.0}, {"a": 1.0, "b": 2.0}], ["a", "b"]) == "b"


def test_records_hold_each_figure_against_its_bar() -> None:
    made = {record.id: record for record in records_of(DIGITS, found_of())}
    values = {name.removeprefix("step.digits-2."): record.value for name, record in made.items()}
    assert values == {
        "default": pytest.approx(0.99), "horovod": pytest.approx(0.96), "flat": pytest.approx(95 / 76),
        "best-peer": pytest.approx(99 / 88), "peer": pytest.approx(99 / 76),
        "scaling": pytest.approx(1.8), "scaling.all-cores": pytest.approx(1.5),
        "scaling.limit": pytest.approx(99 / 105), "scaling.cores": pytest.approx(105 / 55),
    }  # fmt: skip
    bars = {name: (record.bar, record.sense) for name, record in made.items()}
    assert bars["step.digits-2.default"] == (0.97, "at least")
    assert bars["step.digits-2.horovod"] == bars["step.digits-2.flat"] == (0.95, "at least")
    assert bars["step.digits-2.scaling"] == (1.7, "at least")
    assert all(record.holds for record in made.values())
    assert "95 / 76 (hvd.DistributedOptimizer, yielding)" in made["step.digits-2.flat"].what


def test_the_best_named_one_is_chosen_by_the_screening_and_held_against_by_the_rounds() -> None:
    slower = [{**one, "mpi/ring": 1000.0, "horovod/flat": 110.0} for one in (ROUND, ROUND)]
    (record,) = [r for r in records_of(DIGITS, found_of(rounds=slower)) if r.id.endswith(".default")]
    assert record.value == pytest.approx(0.9)
    assert not record.holds
    assert record.samples["finalists"] == ["mpi/hierarchical", "horovod/flat"]


def test_a_default_that_ran_as_the_best_named_one_is_said_to_differ_by_noise() -> None:
    runs = {DEFAULT: "mpi, hierarchical, fp16", "mpi/hierarchical": "mpi, hierarchical, fp16"}
    for ran, same in ((runs, True), ({**runs, DEFAULT: "horovod, flat, fp16"}, False)):
        (record,) = [r for r in records_of(DIGITS, found_of(runs=ran)) if r.id.endswith(".default")]
        assert ("is noise" in record.what) is same


def test_a_variant_that_failed_makes_its_figures_fail_and_leaves_the_others() -> None:
    rounds = [{name: rate for name, rate in ROUND.items() if name != "horovod/hierarchical"}]
    found = found_of(rounds=rounds, failed={"horovod/hierarchical": "ended with exit code 1"})
    made = {record.id.removeprefix("step.digits-2."): record for record in records_of(DIGITS, found)}
    assert made["default"].holds
    assert not made["horovod"].holds
    assert "not measured" in made["horovod"].what
    assert not made["failed"].holds
    assert made["failed"].samples == {"horovod/hierarchical": "ended with exit code 1"}


def test_records_of_the_cluster_are_by_rate() -> None:
    cell = CELLS["characters-4x2"]
    ids = [record.id for record in records_of(cell, found_of(rate="200mbit"))]
    names = ("default", "horovod", "flat", "best-peer", "peer")
    assert ids == [f"step.characters-4x2.200mbit.{name}" for name in names]
    assert {results_file.figure_of(name) for name in ids} == {"step.characters-4x2"}


def test_samples_per_second_are_over_the_rank_that_took_longest(tmp_path: Path) -> None:
    ranks = []
    for rank, seconds in enumerate((0.5, 1.0)):
        path = tmp_path / f"{rank}.jsonl"
        lines = [
            {"kind": "step", "step": step, "samples": 8, "seconds": {"step": seconds}} for step in (1, 2, 3)
        ]
        lines.insert(1, {"kind": "checkpoint", "step": 1})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
        ranks.append(StepRecords(path))
        assert ranks[-1].read() == 3
        with path.open("a") as file:
            file.write('ep", "step": 4, "samples": 8, "seconds": {"step": 9.0}}\n')
        assert ranks[-1].read() == 4
    assert samples_per_s(ranks, first=2, last=3) == pytest.approx(32 / 2.0)
    # Ranks that never communicate are at different steps: the first is at 8 / 0.5, the second at 8 / 1.0.
    assert samples_per_s_apart(ranks, firsts=[2, 1], lasts=[3, 1]) == pytest.approx(16 + 8)


def test_ranks_are_started_as_a_user_would(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "LD_PRELOAD",
        "OMP_NUM_THREADS",
        "OMPI_MCA_mpi_yield_when_idle",
        "HPCTRAIN_RANKS_PER_NODE",
        "SLURM_JOB_ID",
    ]
    for name in names:
        monkeypatch.setenv(name, "1")
    assert not set(names) & set(user_environment())
    words = launch_words(default_of(CELLS["digits-4x2"]), ["hpctrain", "train", "x.toml"], ranks_per_node=2)
    assert words == [
        "hpctrain",
        "launch",
        "-n",
        "8",
        "--ranks-per-node",
        "2",
        "--",
        "hpctrain",
        "train",
        "x.toml",
    ]


def test_only_the_peers_of_two_ranks_are_started_by_mpirun_and_set_what_horovods_users_set() -> None:
    for cell in CELLS.values():
        for variant in [default_of(cell), *candidates(cell), *companions(cell)]:
            assert variant.by_mpirun == (bool(variant.loop) and cell.num_ranks == 2)
            set_by_user = {name for name, _ in variant.environment}
            assert set_by_user <= {"OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle"}
            assert bool(set_by_user) == (variant.by_mpirun or variant.name == ONE_THREAD)


def test_the_peers_buckets_are_ours() -> None:
    recipe = load_recipe(REPOSITORY / "examples" / "characters.toml")
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(5)))
    groups = parameter_groups(model, recipe)  # 500 kB hold three of these weights, and four biases
    assert [len(group) for group in groups] == [7, 3]
    assert [id(p) for group in groups for p in group] == [id(p) for p in reversed(list(model.parameters()))]


def test_the_tables_are_those_of_the_records() -> None:
    made = tables({"records": [record.as_json() for record in records_of(DIGITS, found_of())]})
    assert set(made) == {"all.digits-2", "started.digits-2"}
    assert "| mpi/hierarchical |  | 100 | 100 | 100 | 101 |" in made["all.digits-2"]
    assert "| mpi/ring |  |  | |  | 90 |" in made["all.digits-2"]
    assert made["started.digits-2"].splitlines()[1:3] == [
        "mpirun -n 2 hpctrain train examples/digits.toml", "# in the ranks: OMP_NUM_THREADS=1",
    ]  # fmt: skip
    failed = failed_record(DIGITS, "x").as_json()
    assert (
        results_file.figure_of(failed["id"]) == "step.digits-2"
    )  # so it replaces the records of earlier runs
    assert not failed["holds"]
    assert tables({"records": [failed]}) == {}


def test_nothing_of_this_machines_folders_is_written_down() -> None:
    assert plain(f"x {REPOSITORY}/examples/digits.toml") == "x examples/digits.toml"
    assert plain(f"mpirun {Path(sys.prefix).resolve()}/bin/hpctrain train") == "mpirun hpctrain train"
