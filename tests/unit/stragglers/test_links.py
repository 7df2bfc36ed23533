"""Which links are slow, from made-up measurements; when links are measured; and pairs of nodes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from hpctrain.comm import World
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.stragglers import (
    Links,
    LinkWatch,
    NodeLink,
    Quantity,
    SlowCause,
    SlowPair,
    SlowRankLimits,
    lines_of,
    measure_links,
    measure_ranks,
    slow_links,
    slow_speeds,
)
from hpctrain.stragglers.node_probe import chosen_rounds, num_rounds, partner_of
from hpctrain.topology import Topology

FAST, SLOW = 112e6, 11e6


def topology(num_nodes: int) -> Topology:
    return Topology.from_node_names([f"node{rank // 2}" for rank in range(2 * num_nodes)])


def links(*rates: float, latencies: list[float] | None = None, pairs: tuple[SlowPair, ...] = ()) -> Links:
    nodes = [
        NodeLink(bytes_per_s=rate, latency_s=latency, slowest_partner=0, slowest_bytes_per_s=rate)
        for rate, latency in zip(rates, latencies or [30e-6] * len(rates), strict=True)
    ]
    return Links(nodes=tuple(nodes), pairs=pairs, seconds=0.1)


# ---------------------------------------------------------------------- findings


@pytest.mark.parametrize("num_nodes", [3, 4, 9])
def test_the_node_with_the_slow_link_is_found_and_no_other(num_nodes: int) -> None:
    rates = [FAST * (1 + 0.3 * (node % 2)) for node in range(num_nodes)]
    rates[1] = SLOW
    (found,) = slow_links(links(*rates).nodes, (), topology=topology(num_nodes))
    assert (found.nodes, found.ranks, found.quantity) == (("node1",), (2, 3), Quantity.BANDWIDTH)
    assert found.describe().startswith(
        "slow bandwidth: node1 to the other nodes 11 MB/s, the median of the nodes is 1"
    )


def test_of_two_nodes_only_a_change_is_seen() -> None:
    before, now = links(FAST, FAST), links(SLOW, SLOW)
    assert not slow_links(now.nodes, (), topology=topology(2))
    (found,) = slow_links(now.nodes, (), topology=topology(2), before=before.nodes)
    assert (found.nodes, found.before) == (("node0", "node1"), True)
    assert found.describe() == "slow bandwidth: between node0 and node1 11 MB/s, it was 112 MB/s"


def test_where_all_links_have_become_slow_all_are_named_together() -> None:
    (found,) = slow_links(links(*[SLOW] * 5).nodes, (), topology=topology(5), before=links(*[FAST] * 5).nodes)
    assert len(found.nodes) == 5
    assert "between 5 nodes" in found.describe()


def test_a_single_slow_pair_and_a_long_latency_are_found() -> None:
    pair = SlowPair(nodes=(0, 2), bytes_per_s=SLOW)
    measured = links(FAST, FAST, FAST, FAST, latencies=[30e-6, 30e-6, 31e-6, 9e-4], pairs=(pair,))
    bandwidth, latency = slow_links(measured.nodes, measured.pairs, topology=topology(4))
    assert (bandwidth.nodes, bandwidth.value) == (("node0", "node2"), SLOW)
    assert (latency.nodes, latency.quantity) == (("node3",), Quantity.LATENCY)


def test_a_slow_core_is_found_with_its_rank() -> None:
    speeds = np.array([30.0, 29.0, 31.0, 15.0, 32.0, 22.0]) * 1e9
    (found,) = slow_speeds(speeds, quantity=Quantity.ARITHMETIC, topology=topology(3))
    assert (found.ranks, found.nodes) == ((3,), ("node1",))
    assert found.describe() == (
        "slow arithmetic: rank 3 (node1) 15 GFLOP/s, the median of the ranks is 30 GFLOP/s"
    )


# ---------------------------------------------------------------------- when links are measured


class Run:
    """A run of windows of which each has a communication floor and links that a probe would find."""

    def __init__(self, num_nodes: int = 4) -> None:
        self.watch = LinkWatch(topology(num_nodes), limits=SlowRankLimits(windows=3))
        self.num_probes = 0
        self.lines: list[str] = []

    def windows(self, count: int, *, floor_ms: float, found: Links, step_ms: float = 100.0) -> None:
        for _ in range(count):
            if self.watch.wants_probe(floor_s=floor_ms / 1e3, step_s=step_ms / 1e3):
                self.num_probes += 1
                self.lines += lines_of(self.watch.probed(found), over="")


SOUND = links(FAST, FAST, FAST, FAST)
ONE_SLOW = links(FAST, FAST, SLOW, FAST)


def test_a_link_that_becomes_slow_is_named_and_its_end_too() -> None:
    run = Run()
    run.windows(10, floor_ms=20, found=SOUND)
    assert run.num_probes == 1  # at the start
    run.windows(30, floor_ms=150, step_ms=250, found=ONE_SLOW)
    assert run.num_probes == 3  # and two that agree
    run.windows(30, floor_ms=20, found=SOUND)
    assert run.num_probes == 4
    assert run.lines == [
        "ranks 4-5 (node2) are slow (network): 11 MB/s between node2 and the other nodes, the median of the nodes is "
        "112 MB/s; all ranks wait 130 ms per step for communication",
        "ranks 4-5 (node2) are no longer slow (network)",
    ]
    assert not run.watch.named


def test_a_link_that_is_slow_from_the_start_is_named_if_it_costs_time() -> None:
    run = Run()
    run.windows(3, floor_ms=150, step_ms=250, found=ONE_SLOW)
    assert [slow.nodes for slow in run.watch.named] == [("node2",)]
    assert run.watch.named[0].cause is SlowCause.NETWORK
    run = Run()
    run.windows(30, floor_ms=5, found=ONE_SLOW)
    assert (run.lines, run.num_probes) == ([], 1)


def test_between_two_nodes_a_change_is_named() -> None:
    run = Run(num_nodes=2)
    run.windows(3, floor_ms=20, found=links(FAST, FAST))
    run.windows(9, floor_ms=150, step_ms=250, found=links(SLOW, SLOW))
    assert run.lines[0].startswith(
        "ranks 0-3 (node0, node1) are slow (network): 11 MB/s between node0 and node1, it was 112 MB/s;"
    )


def test_one_bad_measurement_names_nothing() -> None:
    run = Run()
    run.windows(5, floor_ms=20, found=SOUND)
    run.windows(3, floor_ms=150, step_ms=250, found=ONE_SLOW)
    run.windows(30, floor_ms=150, step_ms=250, found=SOUND)
    assert (run.lines, run.num_probes) == ([], 3)


def test_a_floor_that_goes_up_and_down_for_other_reasons_is_measured_ever_more_rarely() -> None:
    run = Run()
    for _ in range(100):
        run.windows(70, floor_ms=20, found=SOUND)
        run.windows(70, floor_ms=150, step_ms=250, found=SOUND)
    assert run.lines == []
    assert run.num_probes < 110
    steady = Run()
    steady.windows(10_000, floor_ms=150, step_ms=250, found=SOUND)
    assert steady.num_probes == 1


# ---------------------------------------------------------------------- pairs


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 18, 19])
def test_in_all_rounds_every_two_nodes_meet_once_and_each_is_in_one_pair_at_a_time(num_nodes: int) -> None:
    met = []
    for number in range(num_rounds(num_nodes)):
        partners = [partner_of(node, number=number, num_nodes=num_nodes) for node in range(num_nodes)]
        for node, partner in enumerate(partners):
            if partner is not None:
                assert partners[partner] == node != partner
                met.append((min(node, partner), max(node, partner)))
    assert sorted(met[::1]) == sorted(2 * list(combinations(range(num_nodes), 2)))


def test_of_many_nodes_a_few_rounds_are_measured() -> None:
    assert list(chosen_rounds(5, at_most=8)) == [0, 1, 2, 3, 4]
    some = list(chosen_rounds(1000, at_most=8))
    assert len(set(some)) == 8
    assert max(some) < num_rounds(1000)
    assert len(chosen_rounds(1000, at_most=None)) == 999


@pytest.mark.parametrize("thorough", [False, True])
def test_ranks_measure_their_links_and_all_know_the_result(thorough: bool) -> None:
    def case(world: World) -> Links | None:
        placed = Topology.from_node_names(["a", "b", "b", "c"])
        return measure_links(world, placed, thorough=thorough)

    found = run_threads(4, case, timeout_s=300)
    assert all(result == found[0] for result in found)
    assert found[0] is not None
    assert len(found[0].nodes) == 3
    for link in found[0].nodes:
        assert link.bytes_per_s > 1e6
        assert 0 < link.latency_s < 1


def test_one_node_has_no_links_and_its_rank_is_measured() -> None:
    import torch

    world = SerialWorld()
    assert measure_links(world, Topology.from_node_names(["a"]), thorough=True) is None
    speeds = measure_ranks(world, device=torch.device("cpu"))
    assert speeds.flop_per_s.shape == (1,)
    assert speeds.flop_per_s[0] > 1e8
    assert speeds.memory_bytes_per_s[0] > 1e8
