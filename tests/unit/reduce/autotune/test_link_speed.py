"""The measured levels, over threads: links whose latency and rate are known, and a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import pytest
import torch

from hpctrain.comm import Collective, ReduceOp, World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import Forwarding
from hpctrain.reduce.autotune.link_speed import SOME_BYTES, LinkSpeed, measure_levels
from hpctrain.topology import Topology

CPU = torch.device("cpu")
NODES = Topology.from_node_names(["a", "a", "b", "b", "c", "c"])
GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Link:
    """burst_bytes: what it takes at once after a pause, however slow it is."""

    latency_s: float
    bytes_per_s: float
    burst_bytes: float = 0.0


WITHIN = Link(latency_s=2e-5, bytes_per_s=4e9)


@final
class Clock:
    """Of one rank. passed_bytes: what has gone over the link since the last pause."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.passed_bytes = 0.0

    def __call__(self) -> float:
        return self.now_s

    def send(self, num_bytes: float, *, link: Link) -> None:
        waiting = max(0.0, self.passed_bytes + num_bytes - max(link.burst_bytes, self.passed_bytes))
        self.passed_bytes += num_bytes
        self.now_s += link.latency_s + waiting / link.bytes_per_s


@final
class LinkedGroup(Forwarding):
    """Its all-reduce takes as long as a ring's over a link that several groups share."""

    def __init__(self, group: Collective, *, link: Link, num_sharers: int, clock: Clock) -> None:
        self._group = group
        self._link = link
        self._num_sharers = num_sharers
        self._clock = clock

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        self._group.all_reduce(buffer, op=op)
        sent = 2 * (self.num_ranks - 1) / self.num_ranks * buffer.numel() * buffer.element_size()
        self._clock.send(self._num_sharers * sent, link=self._link)


@final
class LinkedWorld(Forwarding):
    """Groups of one node are linked by `within`, others by `between`, which all groups share."""

    def __init__(
        self, world: World, *, topology: Topology, within: Link, between: Link, clock: Clock
    ) -> None:
        self._group = self._world = world
        self._topology = topology
        self._links = {"local": (within, 1), "node": (between, len(topology.groups("node")))}
        self._clock = clock

    def barrier(self) -> None:
        self._world.barrier()
        self._clock.passed_bytes = 0.0

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        group = self._world.split(groups)
        axis = "local" if tuple(map(tuple, groups)) == self._topology.groups("local") else "node"
        link, num_sharers = self._links[axis]
        if group is None:
            return None
        return LinkedGroup(group, link=link, num_sharers=num_sharers, clock=self._clock)


def measure(
    *,
    topology: Topology = NODES,
    within: Callable[[int], Link] = lambda rank: WITHIN,
    between: Link = Link(latency_s=1e-4, bytes_per_s=GBIT),
) -> tuple[dict[str, LinkSpeed], float]:
    """The levels by axis, which all ranks must have found alike, and how long the slowest rank took. s"""

    def on_rank(world: World) -> tuple[tuple[LinkSpeed, ...], float]:
        clock = Clock()
        linked = LinkedWorld(
            world, topology=topology, within=within(world.rank), between=between, clock=clock
        )
        return measure_levels(linked, topology, device=CPU, clock=clock), clock.now_s  # type: ignore[arg-type]

    results = run_threads(topology.num_ranks, on_rank)
    assert all(levels == results[0][0] for levels, _ in results)
    return {level.axis: level for level in results[0][0]}, max(wall_s for _, wall_s in results)


@pytest.mark.parametrize(
    "link",
    [
        Link(latency_s=5e-6, bytes_per_s=80 * GBIT),
        Link(latency_s=1e-4, bytes_per_s=GBIT),
        Link(latency_s=1e-3, bytes_per_s=GBIT / 5),
        Link(latency_s=1e-3, bytes_per_s=GBIT / 100),
    ],
    ids=["80 Gbit/s", "1 Gbit/s", "200 Mbit/s", "10 Mbit/s"],
)
def test_latency_and_rate_of_both_levels_are_found_again(link: Link) -> None:
    levels, _ = measure(between=link)
    assert [(level.axis, level.num_members) for level in levels.values()] == [("local", 2), ("node", 3)]
    for axis, known in (("local", WITHIN), ("node", link)):
        assert levels[axis].latency_s == pytest.approx(known.latency_s, rel=0.02)  # its 8 bytes take time too
        assert levels[axis].bytes_per_s == pytest.approx(known.bytes_per_s, rel=0.01)


def test_what_a_link_takes_at_once_is_not_taken_for_its_rate() -> None:
    one_alone = 2 * 2 / 3 * SOME_BYTES * 2  # of three nodes, two ranks each
    link = Link(latency_s=1e-3, bytes_per_s=GBIT / 5, burst_bytes=one_alone / 2)
    levels, _ = measure(between=link)
    assert levels["node"].bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.15)


def test_the_slowest_rank_counts() -> None:
    slow = Link(latency_s=3e-4, bytes_per_s=1e9)
    levels, _ = measure(within=lambda rank: slow if rank == 3 else WITHIN)
    assert levels["local"].latency_s == pytest.approx(slow.latency_s, rel=0.01)
    assert levels["local"].bytes_per_s == pytest.approx(slow.bytes_per_s, rel=0.01)


def test_of_unequal_nodes_a_rank_without_a_partner_waits_and_finds_the_same() -> None:
    link = Link(latency_s=1e-4, bytes_per_s=GBIT)
    levels, _ = measure(topology=Topology.from_node_names(["a", "a", "b"]), between=link)
    assert levels["local"].num_members == levels["node"].num_members == 2
    assert levels["local"].bytes_per_s == pytest.approx(WITHIN.bytes_per_s, rel=0.01)
    assert levels["node"].bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.01)


def test_a_level_without_a_second_member_is_not_measured() -> None:
    assert list(measure(topology=Topology.from_node_names(["a", "a"]))[0]) == ["local"]
    assert list(measure(topology=Topology.from_node_names(["a", "b"]))[0]) == ["node"]


def test_where_one_reduction_uses_the_time_up_no_other_follows_but_those_that_are_needed() -> None:
    slow = Link(latency_s=0.3, bytes_per_s=GBIT)
    levels, wall_s = measure(between=slow)
    # Connections, latency, rate: once each.
    assert wall_s == pytest.approx(3 * slow.latency_s, rel=0.05)
    assert levels["node"].latency_s == pytest.approx(slow.latency_s, rel=0.01)
