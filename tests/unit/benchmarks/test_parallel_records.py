"""What is computed from what the ranks of split models found, the formulas, and the page of it."""

from __future__ import annotations

import pytest

from benchmarks import harness
from benchmarks.harness import Bench, Part, measure
from benchmarks.parallel import figures
from benchmarks.parallel.layouts import LAYOUTS, Counts, Layout, arrangements, of_figure
from benchmarks.parallel.suite import SUITE
from benchmarks.parallel.timed import METHODS, PEERS, in_turns, methods_at, missing_memory, wrong_losses
from benchmarks.places import RanksFailed
from benchmarks.results_file import Record
from tests.cluster import Cluster, ClusterError
from tests.unit.benchmarks.records import record

NONE, PARAMETERS, NODE = (LAYOUTS[name] for name in ("none", "parameters", "parameters-node"))
P = 1_000_000


def held(name: str, *, sharing: int, split: int = 0) -> float:
    """Bytes per parameter."""
    return LAYOUTS[name].held_bytes(Counts(parameters=P, split=split), sharing=sharing) / P


def sent(layout: Layout, *, num_nodes: int, bits: int = 32, split: int = 0) -> float:
    """Times the parameters' bytes."""
    return layout.sent_bytes(Counts(parameters=P, split=split), num_nodes=num_nodes, bits=bits) / P / 4


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_the_formulas_of_the_layouts(num: int) -> None:
    once = (num - 1) / num
    assert held("none", sharing=num) == 16
    assert held("optimizer", sharing=num) == pytest.approx(8 + 12 / num)
    assert held("gradients", sharing=num) == pytest.approx(8 + 12 / num)  # two buckets would be more than all
    large = Counts(parameters=100 * P)
    buckets_bytes = LAYOUTS["gradients"].held_bytes(large, sharing=num) - (4 + 12 / num) * 100 * P
    assert buckets_bytes == pytest.approx(8e6)
    assert held("parameters", sharing=num) == held("parameters-node", sharing=num) == 16 / num
    assert [sent(NONE, num_nodes=num, bits=bits) for bits in (32, 16, 8)] == pytest.approx(
        [2 * once, once, once / 2]
    )
    for name in ("optimizer", "gradients"):
        assert [sent(LAYOUTS[name], num_nodes=num, bits=bits) for bits in (32, 16, 8)] == pytest.approx(
            [2 * once, 1.5 * once, 1.25 * once]
        )
    assert sent(PARAMETERS, num_nodes=num) == pytest.approx(3 * once)
    fifth = Counts(parameters=P, gathered_once=P // 5)  # is not gathered for backward
    assert PARAMETERS.sent_bytes(fifth, num_nodes=num, bits=32) / P / 4 == pytest.approx(2.8 * once)
    assert sent(NODE, num_nodes=num) == pytest.approx(2 * once)
    assert NODE.sent_bytes(fifth, num_nodes=num, bits=32) / P / 4 == pytest.approx(2 * once)


def test_what_a_tensor_group_does_not_split_each_of_its_ranks_holds_and_sends() -> None:
    split = 800_000
    assert held("tensor-2", sharing=4, split=split) == pytest.approx(16 * 0.6)
    assert held("tensor-4", sharing=4, split=split) == pytest.approx(16 * 0.4)
    assert held("tensor-2-parameters", sharing=4, split=split) == pytest.approx(8 * 0.6)
    assert held("pipeline-4", sharing=4) == 4
    # Two ranks share the optimizer of a stage, which is half of the model.
    assert held("pipeline-2-optimizer", sharing=4) == pytest.approx((8 + 12 / 2) / 2)
    assert sent(LAYOUTS["tensor-2"], num_nodes=4, split=split) == pytest.approx(1.5 * 1.2)
    assert sent(LAYOUTS["tensor-2-parameters"], num_nodes=4, split=split) == pytest.approx(2.25 * 1.2)


def test_a_pipeline_sums_its_stages_and_sends_what_is_between_them() -> None:
    counts = Counts(parameters=P, largest_stage=600_000, border=50_000)
    two, four = LAYOUTS["pipeline-2"], LAYOUTS["pipeline-4"]
    assert two.sent_bytes(counts, num_nodes=2, bits=32) == 4 * 50_000  # one pipeline
    assert two.sent_bytes(counts, num_nodes=4, bits=32) == 4 * (600_000 + 50_000)
    assert two.sent_bytes(counts, num_nodes=8, bits=32) == 4 * (1.5 * 600_000 + 50_000)
    assert four.sent_bytes(counts, num_nodes=8, bits=32) == 4 * (600_000 + 2 * 50_000)


def test_every_layout_is_measured_where_it_fits() -> None:
    every = LAYOUTS.values()
    assert arrangements(every, num_ranks=1) == {1: ["none", "optimizer", "gradients", "parameters"]}
    on_four = arrangements(every, num_ranks=4)
    assert on_four[1] == ["tensor-4"]
    assert {"pipeline-2-tensor-2", "pipeline-2-parameters", "tensor-2-sequence"} <= set(on_four[2])
    assert {"tensor-2", "tensor-2-parameters", "parameters-node", "pipeline-4"} <= set(on_four[2])
    on_eight = arrangements(every, num_ranks=8)
    assert on_eight[1] == ["tensor-8"]
    assert sorted([*on_eight[2], "tensor-8"]) == sorted(LAYOUTS)


def test_every_division_of_eight_ranks_is_compared_with_one_process() -> None:
    found = {
        (layout.pipeline, layout.tensor) for layout in of_figure("1") if layout.fits(num_ranks=8, num_nodes=1)
    }
    powers = (1, 2, 4, 8)
    assert found == {(p, t) for p in powers for t in powers if p * t <= 8}
    everywhere = arrangements(of_figure("6"), num_ranks=4)
    assert {name for names in everywhere.values() for name in names} == {one.name for one in of_figure("6")}


def test_layouts_that_are_timed_are_held_against_peers() -> None:
    assert {layout.peer for layout in of_figure("4") if layout.peer} <= PEERS.keys()
    on_node = methods_at(num_nodes=1, ranks_per_node=2)
    assert {"ours-optimizer", "ours-gradients", "ours-tensor-2", "zero"} <= on_node.keys()
    assert "ours-parameters-node" not in on_node
    assert not {"ours-parameters-node", "ours-tensor-2"} & methods_at(num_nodes=4, ranks_per_node=1).keys()
    assert "ours-parameters-node" in methods_at(num_nodes=4, ranks_per_node=2)
    assert not any(method.wire == "int8" for method in METHODS.values())


@pytest.mark.parametrize(
    ("num_nodes", "ranks_per_node", "divided"),
    [(1, 2, ["ours-tensor-2", "ours-pipeline-2", "tensor", "pipeline"]),
     (4, 1, ["ours-pipeline-2", "pipeline"]),
     (4, 2, ["ours-tensor-2", "ours-pipeline-2", "tensor", "pipeline"])],
)  # fmt: skip
def test_tensor_groups_and_pipelines_take_turns_with_their_peers_only(
    num_nodes: int, ranks_per_node: int, divided: list[str]
) -> None:
    methods = methods_at(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    copies, dividing = in_turns(methods)
    assert [method.name for method in dividing] == divided
    assert {method.name for method in copies} == methods.keys() - set(divided)
    assert {"ddp", "zero", "fsdp2"} <= {method.name for method in copies}


def test_the_largest_difference_of_any_number_of_ranks_counts() -> None:
    found = {
        2: [{"relative": {"language": {"none": 1e-15, "parameters": 2e-15}}, "bits": {"language": {}}}],
        4: [
            {"relative": {"language": {"none": 3e-9}}, "bits": {"language": {"optimizer": 0}}},
            {"relative": {"language": {"parameters": 1e-15}}, "bits": {"language": {"gradients": 2}}},
        ],
    }
    first, second, optimizer, gradients = figures.equality_records(found, steps=20)
    assert (first.id, first.value, first.holds) == ("parallel.1.language.none", 3e-9, False)
    assert (second.id, second.value, second.holds) == ("parallel.1.language.parameters", 2e-15, True)
    assert "ranks 2, 4" in first.what
    assert first.as_json()["value"] == 3e-9
    assert (optimizer.id, optimizer.holds) == ("parallel.1.bits.language.optimizer", True)
    assert (gradients.id, gradients.holds) == ("parallel.1.bits.language.gradients", False)


def test_memory_is_held_against_the_formula_in_both_directions() -> None:
    found = {
        "parameters": 1_000_000,
        "split": 0,
        "held_bytes": [4_040_000, 3_600_000],
        "peak_bytes": [5_000_000, 5_000_000],
    }
    record = figures.memory_record(PARAMETERS, found, num_ranks=4, sharing=4)
    assert (record.id, record.value) == ("parallel.2.parameters.4", pytest.approx(0.1))
    assert not record.holds
    assert (
        figures.tables({"records": [record.as_json()]})["memory"].splitlines()[2]
        == "| parameters.4 | 4 | 4 to 4 | 5 |"
    )


def test_a_plan_is_held_against_the_rank_that_grew_most_without_what_a_small_model_needs() -> None:
    measured = {"small": [10_000_000, 20_000_000], "large": [110_000_000, 120_000_000]}
    record = figures.plan_record(
        "none", measured=measured, planned={"small": 1_000_000, "large": 96_000_000}, num_ranks=2
    )
    assert (record.id, record.value) == ("parallel.2.plan.none", pytest.approx(0.05))
    assert record.holds
    assert (
        figures.tables({"records": [record.as_json()]})["plan"].splitlines()[2] == "| none | 95 | 100 | -5% |"
    )


def test_traffic_is_of_the_node_that_sent_most() -> None:
    found = {
        "pause": {"seconds": 2.0, "node_bytes": [100, 90]},
        "none/fp16": {
            "seconds": 1.0, "node_bytes": [6_000_000, 6_060_000], "counts": {"parameters": 1_000_000, "split": 0},
        },
    }  # fmt: skip
    record = figures.traffic_record(NONE, "fp16", found, num_nodes=4, ranks_per_node=1, steps=2)
    assert (record.id, record.value) == ("parallel.3.none.fp16", pytest.approx(1.01))
    assert record.holds


def test_bubbles_are_held_against_the_formula_and_two_stages_a_rank_against_1f1b() -> None:
    steps = {"gpipe": 0.66, "1f1b": 0.70, "interleaved": 0.60, "zero-bubble": 0.71}
    found = [
        {
            "schedule": name,
            "micro_batches": 8,
            "message_bytes": 1024,
            "seconds": [step_s, step_s, 9.0],
            "alone_s": 0.48,
        }
        for name, step_s in steps.items()
    ]
    records = figures.bubble_records(found, num_ranks=4)
    assert [record.id.removeprefix("parallel.5.") for record in records] == [
        f"{name}.8.1KiB" for name in steps
    ]
    assert [record.value for record in records] == pytest.approx([1 - 0.48 / s for s in steps.values()])
    assert [record.bar for record in records] == pytest.approx(
        [3 / 11 + 0.03] * 2 + [1 - 0.48 / 0.70] * 2, abs=1e-4
    )
    assert [record.holds for record in records] == [True, False, True, False]


def test_exposed_communication_of_sharded_gradients_is_held_against_whole_copies() -> None:
    assert figures.exposed_records({"ours-none": [0.1]}, place="4x1", where="there") == []
    exposed = {"ours-none": [0.1, 0.2, 0.1], "ours-gradients": [0.12, 0.18, 0.11], "ours-optimizer": [0.1]}
    (record,) = figures.exposed_records(exposed, place="4x1", where="there")
    assert (record.id, record.value) == ("parallel.4.4x1.exposed", pytest.approx(1.1))
    assert not record.holds


def timed(*, binds: bool = True) -> dict[str, Record]:
    seconds = {
        "ours-none": [0.10, 0.12, 0.11], "ours-parameters": [0.20, 0.20, 0.22], "ours-none-fp16": [0.05, 0.05, 0.05],
        "ours-optimizer": [0.12, 0.12, 0.12], "ours-tensor-2": [0.3, 0.3, 0.3], "tensor": [0.33, 0.3, 0.36],
        "ours-pipeline-2": [0.01, 0.01, 0.01], "pipeline": [0.009, 0.01, 0.01],
        "ddp": [0.11, 0.12, 0.12], "zero": [0.15, 0.15, 0.15], "fsdp2": [0.30, 0.26, 0.28],
        "ddp-fp16": [0.06, 0.06, 0.07],
    }  # fmt: skip
    made = figures.time_records(seconds, METHODS, place="4x1.1gbit", where="there", binds=binds)
    return {record.id.removeprefix("parallel.4.4x1.1gbit."): record for record in made}


def test_times_are_held_against_the_best_peer_with_as_many_bits_and_like_against_like() -> None:
    records = timed()
    assert list(records) == [
        "best",
        "best-16",
        "none",
        "parameters",
        "optimizer",
        "tensor-2",
        "pipeline-2",
    ]
    assert records["best"].value == pytest.approx(0.12 / 0.11)
    assert not records["best"].holds
    assert timed(binds=False)["best"].holds
    assert records["best-16"].value == pytest.approx(1.2)
    assert records["parameters"].value == pytest.approx(1.3)
    assert (
        "ZeroRedundancyOptimizer on Gloo / ours, optimizer sharded (ZeRO-1): 150 / 120 ms"
        in records["optimizer"].what
    )
    assert tuple(records["parameters"].range) == (pytest.approx(0.28 / 0.22), pytest.approx(1.5))
    assert "FSDP2 on Gloo / ours, parameters sharded (ZeRO-3): 280 / 200 ms" in records["parameters"].what
    assert (records["tensor-2"].value, records["tensor-2"].bar) == (pytest.approx(1.1), 1.0)
    assert (records["pipeline-2"].value, records["pipeline-2"].bar) == (pytest.approx(1.0), 1.0)
    lines = figures.tables({"records": [record.as_json() for record in records.values()]})[
        "times"
    ].splitlines()
    assert lines[0] == "| ms, median of the rounds | 4x1.1gbit |"
    assert "| whole copies, ours | 110 |" in lines
    assert "| tensor groups of 2, ours | 300 |" in lines
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


def test_methods_that_train_something_else_are_named() -> None:
    assert wrong_losses({"a": 5.0, "b": 5.0001, "c": 4.9999}) == {}
    assert wrong_losses({}) == {}
    wrong = wrong_losses({"a": 5.0, "b": 5.0, "c": 4.9, "d": float("nan")})
    assert wrong.keys() == {"c", "d"}
    assert "4.9" in wrong["c"]


def test_ranks_are_not_started_without_memory_for_them() -> None:
    meminfo = "MemTotal: 24000000 kB\nMemFree: 1 kB\nMemAvailable: {} kB\n"
    assert missing_memory(meminfo.format(20_000_000), num_ranks=8) == ""
    assert "8 ranks need 3.8 GB of memory, and 3.1 GB are free" in missing_memory(
        meminfo.format(3_000_000), num_ranks=8
    )


def test_a_part_that_fails_is_named_and_the_others_are_measured_and_kept() -> None:
    def fails(bench: Bench) -> list[Record]:
        raise RanksFailed("out of memory")

    def is_wrong(bench: Bench) -> list[Record]:
        raise KeyError("held")

    def loses_one(bench: Bench) -> list[Record]:
        with bench.attempt("memory of whole copies"):
            raise RanksFailed("killed")
        return [record("parallel.2.plan.none")]

    said: list[str] = []
    kept: list[list[str]] = []
    parts = (("1", "equality", fails), ("1", "more", is_wrong), ("2", "memory", loses_one))
    with Bench(say=said.append) as bench:
        run, complete = measure(
            "parallel",
            [Part(figures=(figure,), title=title, measure=part) for figure, title, part in parts],
            bench=bench,
            after_part=lambda run: kept.append([record.id for record in run.records]),
        )
    assert complete
    assert run.failed == {
        "parallel.1": ["equality", "more"],
        "parallel.2": ["memory: memory of whole copies"],
    }
    assert kept == [[], [], ["parallel.2.plan.none"]]
    assert any("out of memory" in line for line in said)
    assert any("KeyError: 'held'" in line for line in said)


def test_a_figure_of_nodes_is_not_measured_without_a_cluster_and_failed_if_it_cannot_be_brought_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_up(*arguments: object, **more: object) -> None:
        raise ClusterError("no slurmd")

    traffic = [part for part in SUITE.parts if part.figures == ("3",)]
    monkeypatch.setattr(Cluster, "up", not_up)
    for reason, failed in ((None, {"parallel.3": ["traffic"]}), ("not root", {})):
        monkeypatch.setattr(harness, "why_not", lambda reason=reason: reason)
        with Bench(say=lambda what: None, scale=SUITE.quick) as bench:
            run, complete = measure("parallel", traffic, bench=bench)
        assert (run.failed, complete) == (failed, reason is None)
