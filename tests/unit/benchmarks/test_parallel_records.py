"""What is computed from what the ranks of split models found, the formulas, and the page of it."""

from __future__ import annotations

import json

import pytest

from benchmarks.parallel import figures, page
from benchmarks.parallel.layouts import LAYOUTS, PEERS, timed_methods
from benchmarks.parallel.planned.runs import record_of
from benchmarks.parallel.timed.rounds import WrongTraining, check_losses
from benchmarks.results_file import Record
from benchmarks.starting import REPOSITORY

NONE, PARAMETERS, NODE = (LAYOUTS[name] for name in ("none", "parameters", "parameters-node"))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_formulas_of_the_layouts(num_ranks: int) -> None:
    once = (num_ranks - 1) / num_ranks
    assert NONE.bytes_a_parameter(num_ranks) == 16
    assert PARAMETERS.bytes_a_parameter(num_ranks) == NODE.bytes_a_parameter(num_ranks) == 16 / num_ranks
    assert [NONE.sent(num_ranks, bits) for bits in (32, 16, 8)] == pytest.approx([2 * once, once, once / 2])
    assert PARAMETERS.sent(num_ranks, 32) == pytest.approx(3 * once)
    assert NODE.sent(num_ranks, 32) == pytest.approx(2 * once)


def test_every_layout_has_a_peer_that_holds_as_much() -> None:
    assert {layout.peer for layout in LAYOUTS.values()} <= PEERS.keys()
    assert not any(name.startswith("ours-parameters-node") for name in timed_methods(several_nodes=False))
    assert "ours-parameters-node" in timed_methods(several_nodes=True)
    assert not any(method.wire == "int8" for method in timed_methods(several_nodes=True).values())


def test_the_largest_difference_of_any_number_of_ranks_counts() -> None:
    found = {
        2: {"language": {"none": 1e-15, "parameters": 2e-15}},
        4: {"language": {"none": 3e-9, "parameters": 1e-15}},
    }
    first, second = figures.equality_records(found, steps=20)
    assert (first.id, first.value, first.holds) == ("parallel.1.language.none", 3e-9, False)
    assert (second.id, second.value, second.holds) == ("parallel.1.language.parameters", 2e-15, True)
    assert "ranks 2, 4" in first.what
    assert first.as_json()["value"] == 3e-9


def test_memory_is_held_against_the_formula_in_both_directions() -> None:
    found = {
        "parameters": 1_000_000,
        "held_bytes": [4_040_000, 3_600_000],
        "peak_bytes": [5_000_000, 5_000_000],
    }
    record = figures.memory_record(PARAMETERS, found, num_ranks=4, sharing=4)
    assert (record.id, record.value) == ("parallel.2.parameters.4", pytest.approx(0.1))
    assert not record.holds
    assert page.tables([record.as_json()])["memory"].splitlines()[2] == "| parameters.4 | 4 | 4 to 4 | 5 |"


def test_a_plan_is_held_against_the_rank_that_grew_most_without_what_a_small_model_needs() -> None:
    measured = {"small": [10_000_000, 20_000_000], "large": [110_000_000, 120_000_000]}
    record = record_of("none", measured=measured, planned={"small": 1_000_000, "large": 96_000_000})
    assert (record.id, record.value) == ("parallel.2.plan.none", pytest.approx(0.05))
    assert record.holds
    assert page.tables([record.as_json()])["plan"].splitlines()[2] == "| none | 95 | 100 | -5% |"


def test_traffic_is_of_the_node_that_sent_most() -> None:
    found = {
        "parameters": 1_000_000, "pause": {"seconds": 2.0, "node_bytes": [100, 90]},
        "none/fp16": {"seconds": 1.0, "node_bytes": [6_000_000, 6_060_000]},
    }  # fmt: skip
    record = figures.traffic_record(NONE, "fp16", found, num_nodes=4, ranks_per_node=1, steps=2)
    assert (record.id, record.value) == ("parallel.3.none.fp16", pytest.approx(1.01))
    assert record.holds


def timed(*, binds: bool = True) -> dict[str, Record]:
    seconds = {
        "ours-none": [0.10, 0.12, 0.11], "ours-parameters": [0.20, 0.20, 0.22], "ours-none-fp16": [0.05, 0.05, 0.05],
        "ddp": [0.11, 0.12, 0.12], "zero": [0.15, 0.15, 0.15], "fsdp2": [0.30, 0.26, 0.28],
        "ddp-fp16": [0.06, 0.06, 0.07],
    }  # fmt: skip
    methods = timed_methods(several_nodes=True)
    made = figures.time_records(seconds, methods, place="4x1.1gbit", where="there", binds=binds)
    return {record.id.removeprefix("parallel.4.4x1.1gbit."): record for record in made}


def test_times_are_held_against_the_best_peer_with_as_many_bits_and_like_against_like() -> None:
    records = timed()
    assert list(records) == ["best", "best-16", "none", "parameters"]
    assert records["best"].value == pytest.approx(0.12 / 0.11)
    assert not records["best"].holds
    assert timed(binds=False)["best"].holds
    assert records["best-16"].value == pytest.approx(1.2)
    assert records["parameters"].value == pytest.approx(1.3)
    assert tuple(records["parameters"].range) == (pytest.approx(0.28 / 0.22), pytest.approx(1.5))
    assert "FSDP2 on Gloo / ours, parameters sharded: 280 / 200 ms" in records["parameters"].what
    lines = page.tables([record.as_json() for record in records.values()])["times"].splitlines()
    assert lines[0] == "| ms, median of the rounds | 4x1.1gbit |"
    assert "| whole copies, ours | 110 |" in lines
    assert "| DDP and ZeroRedundancyOptimizer, on Gloo | 150 |" in lines


def test_checkpoints_count_different_bits_and_the_largest_difference_of_a_loss() -> None:
    saved = {"none": [2.0, 1.0], "parameters": [2.0, 1.0]}
    loaded = {
        4: {
            "none/parameters": {"different": 0, "losses": [2.0, 1.0]},
            "parameters/none": {"different": 1, "losses": [2.0, 1.5]},
        }
    }
    bits, loss = figures.checkpoint_records(saved, loaded, num_ranks=4)
    assert (bits.id, bits.value, bits.holds) == ("parallel.6.bits.4", 1, False)
    assert (loss.id, loss.value, loss.holds) == ("parallel.6.loss.4", pytest.approx(0.5), False)
    dcp = figures.dcp_record({"to/none": 0, "to/parameters": 0, "from/parameters": 0})
    assert "2 exports and 1 import" in dcp.what
    assert dcp.holds


def test_methods_that_train_something_else_are_refused() -> None:
    check_losses({"a": 5.0, "b": 5.0001, "c": 4.9999})
    check_losses({})
    with pytest.raises(WrongTraining, match=r"'c': 4\.9"):
        check_losses({"a": 5.0, "b": 5.0, "c": 4.9})


def test_the_page_has_a_place_for_every_table_and_says_what_the_file_says() -> None:
    path = REPOSITORY / "docs" / "benchmarks" / "parallel.md"
    text = path.read_text()
    for name in (
        "about",
        "memory",
        "times",
        *(f"{kind}parallel.{n}" for n in "12346" for kind in ("", "started.")),
    ):
        assert f"<!-- begin {name} -->" in text
    results = REPOSITORY / "benchmarks" / "results" / "parallel.json"
    records = json.loads(results.read_text())["records"] if results.exists() else []  # not measured yet
    for name, table in page.tables(records).items():
        assert f"<!-- begin {name} -->\n{table}\n<!-- end {name} -->" in text
