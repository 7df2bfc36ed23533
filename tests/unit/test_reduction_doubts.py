"""Between nodes an algorithm that sends more, or queues streams at a link, must show more to be chosen."""

from __future__ import annotations

import pytest

from hpctrain.reduce.choice import Choice, doubts_between_nodes
from hpctrain.reduce.cost import Candidate, Cost, Measurement
from hpctrain.topology import Topology

CLUSTER = Topology.from_node_names(["a", "a", "b", "b"])


def measured(**seconds: float) -> list[Measurement]:
    return [
        Measurement(algorithm=name.replace("_", "-"), wire="fp16", num_bytes=n, seconds=s * n / 2**20)
        for name, s in seconds.items()
        for n in (2**18, 2**20)
    ]


def chosen(*, ring: float, topology: Topology = CLUSTER) -> str:
    found = measured(hierarchical_ring=0.1, ring=ring)
    choice = Choice.of_measurements(found, doubts=doubts_between_nodes(topology))
    assert choice.for_wire("fp16").choose(2**24) == choice.choose(2**24)
    return choice.choose(2**24).algorithm


def test_a_little_faster_is_not_enough_for_an_algorithm_that_sends_more() -> None:
    assert chosen(ring=0.08) == "hierarchical-ring"
    assert chosen(ring=0.07) == "ring"


def test_on_one_node_only_the_time_counts() -> None:
    assert chosen(ring=0.099, topology=Topology.from_node_names(["a", "a"])) == "ring"


def test_nodes_of_one_rank_send_the_same_either_way() -> None:
    assert chosen(ring=0.099, topology=Topology.from_node_names(["a", "b"])) == "ring"


@pytest.mark.parametrize("one_for_all", [False, True])
def test_the_record_holds_the_times_as_measured_and_the_doubts_beside_them(one_for_all: bool) -> None:
    found = measured(hierarchical_ring=0.1, ring=0.09)
    choice = Choice.of_measurements(found, doubts=doubts_between_nodes(CLUSTER)).for_wire("fp16")
    if one_for_all:
        choice = choice.for_all_sizes([2**20])
    by_name = {entry["algorithm"]: entry for entry in choice.record()["candidates"]}
    assert {name: entry["doubt"] for name, entry in by_name.items()} == {
        "hierarchical-ring": 1.0,
        "ring": 1.4,
    }
    ring = [(m.num_bytes, m.seconds) for m in found if m.algorithm == "ring"]
    assert [(at["bytes"], at["seconds"]) for at in by_name["ring"]["measured"]] == ring
    assert by_name["ring"]["seconds_per_byte"] == Cost.fit(ring).slope
    assert by_name["ring"]["latency_s"] == Cost.fit(ring).latency_s
    # It is the doubted cost that decides.
    assert choice.costs[Candidate("ring", "fp16")].slope > Cost.fit(ring).slope


def test_where_trials_are_short_and_many_only_the_time_counts() -> None:
    found = measured(hierarchical_ring=0.001, ring=0.0009)
    choice = Choice.of_measurements(found, doubts=doubts_between_nodes(CLUSTER))
    assert choice.choose(2**20).algorithm == "ring"
