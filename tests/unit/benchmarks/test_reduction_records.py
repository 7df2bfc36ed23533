"""What the reduction benchmark makes of its measurements."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reduction.suite import (
    bytes_out_of_a_node,
    bytes_records,
    step_records,
    sweep_records,
    tables,
    time_records,
)


def bound(algorithm: str, *, num_nodes: int = 4, ranks_per_node: int = 2) -> float:
    return bytes_out_of_a_node(
        algorithm, numel=25_000_000, elem_bytes=2, num_nodes=num_nodes, ranks_per_node=ranks_per_node
    )


def timed(**milliseconds: list[float]) -> dict[str, Any]:
    return {
        name.replace("_", "-", 1).replace("__", "/"): {"seconds": [ms / 1000 for ms in values]}
        for name, values in milliseconds.items()
    }


PEERS = timed(
    mpi_fp32=3 * [1700], horovod_fp32=3 * [1800], horovod_fp16=3 * [800], gloo_fp32=3 * [1300],
    gloo_fp16=[600, 620, 640], ddp_fp32=3 * [1250], ddp_fp16=3 * [700],
)  # fmt: skip


def test_bounds_are_of_the_algorithms_own_kind() -> None:
    assert bound("hierarchical") == bound("hierarchical-ring") == 75e6
    assert bound("ring") == 87.5e6
    assert bound("direct") == bound("flat") == 150e6
    assert bytes_out_of_a_node("flat", numel=8, elem_bytes=4, num_nodes=4, ranks_per_node=2) == 56
    assert bound("hierarchical", num_nodes=1) == bound("ring", num_nodes=1) == 0
    with pytest.raises(ValueError, match="no bound is known"):
        bound("tree")


def test_one_rank_a_node_needs_the_same_bytes_in_one_level_and_in_two() -> None:
    assert bound("ring", ranks_per_node=1) == bound("direct", ranks_per_node=1)
    assert bound("ring", ranks_per_node=1) == bound("hierarchical", ranks_per_node=1)


def test_the_node_that_sent_most_is_held_against_the_bound() -> None:
    found = {
        "pause": {"node_bytes": [100, 0, 0, 0], "seconds": 2.0},
        "hierarchical/fp16": {"node_bytes": [75_000_000, 90_000_000, 75_000_000, 75_000_000], "seconds": 3.0},
    }
    (record,) = bytes_records(found, numel=25_000_000, elem_bytes=2, num_nodes=4, ranks_per_node=2)
    assert record.id == "reduction.1.hierarchical"
    assert record.value == 1.2
    assert not record.holds


def test_times_are_held_against_the_best_peer_of_each_kind() -> None:
    found = {
        **PEERS,
        "ours/16": {"seconds": 3 * [0.5]},
        "ours/8": {"seconds": 3 * [0.31]},
        "stream": {"seconds": [0.6, 0.5, 9.0]},
    }
    made = {
        record.id: record
        for record in time_records(
            found, rate="200mbit", ours_16="ours/16", ours_8="ours/8", bound_bytes=12e6, stream_bytes=12_000_000,
            full=True,
        )
    }  # fmt: skip
    values = {name.removeprefix("reduction.2.200mbit."): record.value for name, record in made.items()}
    assert values == {
        "bound": pytest.approx(0.5 / 0.6),
        "best-16-bit-peer": pytest.approx(620 / 500),
        "ddp-gloo-fp32": pytest.approx(1250 / 500),
        "horovod-fp32": pytest.approx(1800 / 500),
        "8-bit": pytest.approx(620 / 310),
    }
    assert all(record.holds for record in made.values())
    assert made["reduction.2.200mbit.best-16-bit-peer"].range == (pytest.approx(1.2), pytest.approx(1.28))
    assert made["reduction.2.200mbit.bound"].range == (pytest.approx(0.5 / 9), pytest.approx(1.0))


def test_a_peer_with_open_mpis_ring_counts_where_it_is_the_best() -> None:
    found = {
        **PEERS,
        "ours/16": {"seconds": 3 * [0.5]},
        "ours/8": {"seconds": [0.25, 0.3, 0.4]},
        "ours/16, ring": {"seconds": [0.1]},  # no peer
        "horovod-fp32, ring": {"seconds": [1.2]},
        "horovod-fp16, ring": {"seconds": [0.55]},
        "stream": {"seconds": [0.5]},
    }
    made = time_records(
        found, rate="200mbit", ours_16="ours/16", ours_8="ours/8", bound_bytes=1.0, stream_bytes=1, full=True
    )
    values = {record.id.removeprefix("reduction.2.200mbit."): record.value for record in made}
    assert values["best-16-bit-peer"] == pytest.approx(550 / 500)
    assert values["8-bit"] == pytest.approx(550 / 300)
    # Of two launches no round of one belongs to a round of the other.
    (record,) = [one for one in made if one.id == "reduction.2.200mbit.8-bit"]
    assert record.range == (pytest.approx(550 / 400), pytest.approx(550 / 250))
    assert values["horovod-fp32"] == pytest.approx(1800 / 500)  # as it comes
    assert values["horovod-fp32.ring"] == pytest.approx(1200 / 500)


def test_exposed_communication_is_taken_step_by_step_from_the_alternating_one() -> None:
    slow = 1.0  # in one of two rounds, and for one pair of a round
    without = [[0.1, 0.1, 0.1 + slow], [0.1 + slow] * 3]
    more = {
        "mpi-fp32": 0.1, "ddp-fp32": 0.1, "horovod-fp32": 0.1, "ddp-fp16": 0.04, "horovod-fp16": 0.04,
        "ours-fp32": 0.05, "ours-fp16": 0.02,
    }  # fmt: skip
    late = 0.04  # of the two ranks one computes longer; with communication the other waits for it
    steps = {
        name: {
            "without": [[[step, step - late] for step in block] for block in without],
            "steps": [[[step + by, step + by] for step in block] for block in without],
        }
        for name, by in more.items()
    }
    made = step_records({"transformer": steps}, samples_per_step={"transformer": 12})
    values = {record.id.removeprefix("reduction.3.transformer."): record.value for record in made}
    assert values["exposed"] == values["exposed.fp16"] == pytest.approx(0.5)
    assert values["exposed.fp32"] == pytest.approx(0.5)
    assert values["exposed.mean"] == pytest.approx((0.02 + late / 2) / (0.04 + late / 2))
    # Of one round 0.14 / 0.1 and 0.12 / 0.1, of the other, a slow one, hardly more than 1.
    peer, ours = ((1 + by / 0.1 + 1 + by / (0.1 + slow)) / 2 for by in (0.04, 0.02))
    assert values["throughput"] == pytest.approx(peer / ours)
    assert values["throughput.medians"] == pytest.approx((0.14 + slow) / (0.12 + slow))


def test_a_method_that_was_timed_while_the_machine_was_slow_is_not_called_slow() -> None:
    peers = ("mpi-fp32", "ddp-fp32", "horovod-fp32", "ddp-fp16", "horovod-fp16")
    of = {name: {"steps": [[[1.10, 1.10]]], "without": [[[1.0, 1.0]]]} for name in (*peers, "ours-fp16")}
    of["ours-fp32"] = {"steps": [[[2.10, 2.10]]], "without": [[[2.0, 2.0]]]}
    made = step_records({"transformer": of}, samples_per_step={"transformer": 12})
    values = {record.id.removeprefix("reduction.3.transformer."): record.value for record in made}
    assert values["throughput"] == pytest.approx(1.10 / 1.05)
    assert values["throughput.medians"] == pytest.approx(1.10 / 2.10)


def test_a_peer_counts_as_it_was_started_best_and_ours_as_launch_starts_it() -> None:
    more = {
        "mpi-fp32": 0.10, "ddp-fp32": 0.1, "ddp-fp16": 0.1, "horovod-fp32": 0.4, "horovod-fp16": 0.4,
        "ours-fp32": 0.03, "ours-fp16": 0.03,
        "mpi-fp32, yielding": 0.1, "horovod-fp32, yielding": 0.06, "horovod-fp16, yielding": 0.09,
        "ours-fp32, yielding": 0.01, "ours-fp16, yielding": 0.01,
    }  # fmt: skip
    slower = 1.0  # that launch was timed while the machine was slow
    of = {}
    for name, by in more.items():
        alone = 1.0 + slower * name.endswith("yielding")
        of[name] = {"steps": [[[alone + by, alone + by]]], "without": [[[alone, alone]]]}
    of["horovod-fp32, yielding"]["without"] = [[[2.05, 2.05]]]  # its thread slows these: the others' count
    made = {r.id: r for r in step_records({"transformer": of}, samples_per_step={"transformer": 12})}
    exposed = made["reduction.3.transformer.exposed"]
    assert exposed.value == pytest.approx(0.03 / 0.06)
    assert "ours-fp32 / horovod-fp32, yielding (30.0 / 60.0 ms)" in exposed.what
    assert made["reduction.3.transformer.exposed.fp16"].value == pytest.approx(0.03 / 0.09)
    assert made["reduction.3.transformer.throughput"].value == pytest.approx(1.03 / 1.03)
    assert made["reduction.3.transformer.throughput.medians"].value == pytest.approx(1.10 / 1.03)


def test_what_horovods_thread_takes_from_the_alternating_steps_counts_against_it() -> None:
    peers = ("mpi-fp32", "ddp-fp32", "ddp-fp16")
    of = {name: {"steps": [[[1.10, 1.10]]], "without": [[[1.0, 1.0]]]} for name in (*peers, "ours-fp16")}
    of["ours-fp32"] = {"steps": [[[1.05, 1.05]]], "without": [[[1.0, 1.0]]]}
    for name in ("horovod-fp32", "horovod-fp16"):
        of[name] = {"steps": [[[1.21, 1.21]]], "without": [[[1.20, 1.20]]]}
    made = {r.id: r for r in step_records({"transformer": of}, samples_per_step={"transformer": 21})}
    assert made["reduction.3.transformer.exposed"].value == pytest.approx(0.05 / 0.10)
    samples = made["reduction.3.transformer.exposed.fp32"].samples["exposed s"]
    assert samples["mpi-fp32"] == [pytest.approx(0.10)]
    found = made["reduction.3.transformer.throughput"]
    assert found.samples["slowed by"]["horovod-fp16"] == pytest.approx(1.21)
    assert found.value == pytest.approx(1.10 / 1.05)
    assert "ours-fp32 / mpi-fp32 (20.0 / 19.1)" in found.what
    (table,) = tables({"records": [r.as_json() for r in made.values()]}).values()
    assert table.splitlines()[2].startswith("| ours-fp32 |")
    assert "| horovod-fp16 | 21.0% | 1210.0 | 1200.0 |" in table
    old = {"id": "reduction.3.mlp.throughput", "samples": {"median step s": {"none": 1.0}}}
    assert tables({"records": [old]}) == {}  # of results of an earlier version


def test_auto_is_held_against_the_best_choice_that_was_timed_to_the_end() -> None:
    times = {"auto/auto": [2.0, 2.2, 2.1], "ring/fp16": [2.0, 2.0, 2.0], "flat/fp32": [1.0]}
    found = {"1024": {"times": times, "runs": "ring"}}
    (record,) = sweep_records(found, place="one-node", auto="auto/auto")
    assert record.id == "reduction.4.one-node.4KiB"
    assert record.value == pytest.approx(1.05)
    assert record.holds
