"""Measures the links between nodes, and the speed of each rank's memory and arithmetic.

During a run, `LinkWatch` decides when links are measured, and which links are reported as slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from hpctrain.comm import Transport, World, all_gather_json, receive_message, send_message
from hpctrain.stragglers.probe_findings import (
    SLOW_SHARE,
    NodeLink,
    ProbeFinding,
    Quantity,
    RankSpeeds,
    SlowPair,
    slow_links,
)
from hpctrain.stragglers.slow_ranks import LEAST_EXCESS_S, Change, Slow, SlowCause, SlowRankLimits
from hpctrain.topology import Topology

# Many pairs of nodes are measured at the same time, but each node is in only one pair at a time.
LATENCY_TRIALS = 10
BANDWIDTH_TRIALS = 3
# One message that takes longer shows the link's rate: no further trials.
SLOW_S = 0.05
_SMALL_BYTES = 8
_WAIT = "a message of the probe between nodes"
_LAST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpeed:
    """Speed between two ranks.

    latency_s: one-way time of a message of 8 bytes, in seconds.
    bytes_per_s: bandwidth of large messages, the mean of both directions.
    """

    latency_s: float
    bytes_per_s: float


def partner_of(node: int, *, number: int, num_nodes: int) -> int | None:
    """Returns the node with which `node` is measured in round `number`; None if it has no partner in this round. Pure.

    In the rounds 0 to num_rounds - 1, every two nodes are partners exactly once (the circle method of tournaments).
    """
    even = num_nodes + num_nodes % 2  # a node that is not there makes their number even
    last = even - 1
    if node == last:
        partner = number * (even // 2) % last  # even // 2 is the inverse of 2 modulo an odd number
    else:
        partner = (number - node) % last
        if partner == node:
            partner = last
    return partner if partner < num_nodes else None


def num_rounds(num_nodes: int) -> int:
    """Returns the number of rounds after which every two nodes have been partners."""
    return num_nodes + num_nodes % 2 - 1


def chosen_rounds(num_nodes: int, *, at_most: int | None) -> Sequence[int]:
    """Returns the indices of the rounds to measure: all rounds, or `at_most` rounds, evenly spread. Pure."""
    total = num_rounds(num_nodes)
    if at_most is None or total <= at_most:
        return range(total)
    return [number * total // at_most for number in range(at_most)]


def measure_pair(transport: Transport, *, peer: int, num_bytes: int) -> PairSpeed:
    """Returns the speed between this rank and rank `peer`. Both ranks must call it, and get the same result.

    A message is sent back before the next message is sent, so that no buffer on the way can hide the rate of the link.
    The result is the fastest of a few trials.

    num_bytes: size of a large message, in bytes.
    """
    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
    large = torch.zeros(num_bytes, dtype=torch.uint8)
    result = torch.zeros(2, dtype=torch.float64)
    as_bytes = result.view(torch.uint8)
    begins = transport.rank < peer
    _swap(transport, small, peer=peer, begins=begins)  # opens the connection, and waits until both are here
    if not begins:
        for _ in range(LATENCY_TRIALS):
            _swap(transport, small, peer=peer, begins=False)
        while True:
            _swap(transport, large, peer=peer, begins=False)
            if int(large[0]) == _LAST:
                break
        receive_message(transport, as_bytes, source=peer, what=_WAIT)
        return PairSpeed(latency_s=float(result[0]), bytes_per_s=float(result[1]))
    latency_s = min(_round_trip_s(transport, small, peer=peer) for _ in range(LATENCY_TRIALS)) / 2
    trips_s: list[float] = []
    while not int(large[0]):
        if len(trips_s) == BANDWIDTH_TRIALS - 1 or (trips_s and trips_s[-1] > SLOW_S):
            large[0] = _LAST
        trips_s.append(_round_trip_s(transport, large, peer=peer))
    result[0], result[1] = latency_s, 2 * num_bytes / max(min(trips_s), 1e-9)
    send_message(transport, as_bytes, to=peer, what=_WAIT)
    return PairSpeed(latency_s=latency_s, bytes_per_s=float(result[1]))


def _round_trip_s(transport: Transport, buffer: torch.Tensor, *, peer: int) -> float:
    began = time.perf_counter()
    _swap(transport, buffer, peer=peer, begins=True)
    return time.perf_counter() - began


def _swap(transport: Transport, buffer: torch.Tensor, *, peer: int, begins: bool) -> None:
    """Sends `buffer` to the rank `peer` and back.

    begins: True on the rank that sends first.
    """
    for send in (begins, not begins):
        if send:
            send_message(transport, buffer, to=peer, what=_WAIT)
        else:
            receive_message(transport, buffer, source=peer, what=_WAIT)


# Measures the nodes.


# Enough partners to distinguish a slow node from a slow partner, and enough bytes to detect a rate lower by a tenth.
QUICK_ROUNDS = 8
QUICK_BYTES = 1 << 18
THOROUGH_BYTES = 1 << 22
_COPY_BYTES = 1 << 26
_COPIES = 7
_MATRIX = 768
_PRODUCTS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of all nodes.

    nodes: the link of each node.
    pairs: pairs of nodes between which messages are slower than is usual for both nodes.
    seconds: duration of the measurement.
    """

    nodes: tuple[NodeLink, ...]
    pairs: tuple[SlowPair, ...]
    seconds: float


def measure_links(world: World, topology: Topology, *, thorough: bool) -> Links | None:
    """Measures the links between the first ranks of all nodes. Collective; no rank may send anything else meanwhile.

    Returns the same result on every rank; None if there is only one node, or if the backend has no point-to-point
    messages. Each rank receives 32 bytes per node.

    thorough: True to measure all pairs of nodes, with large messages. False to measure each node with at most
    QUICK_ROUNDS other nodes.
    """
    if topology.num_nodes == 1:
        return None
    transport = world.transport(topology)
    if transport is None:
        return None
    began = time.perf_counter()
    transport.begun("probe of the links between nodes")
    speeds: dict[int, PairSpeed] = {}
    if topology.local_rank_of(world.rank) == 0:
        speeds = _measure_partners(transport, topology, thorough=thorough)
    found = _gather(world, topology, speeds)
    transport.close()
    pairs = all_gather_json(world, _slow_pairs(speeds, node=topology.node_of(world.rank), links=found))
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    world.broadcast(seconds, root=0)
    slow = sorted({tuple(pair) for own in pairs for pair in own})
    return Links(
        nodes=tuple(found),
        pairs=tuple(SlowPair(nodes=(a, b), bytes_per_s=rate) for a, b, rate in slow),
        seconds=float(seconds),
    )


def _measure_partners(transport: Transport, topology: Topology, *, thorough: bool) -> dict[int, PairSpeed]:
    node = topology.node_of(transport.rank)
    speeds = {}
    for number in chosen_rounds(topology.num_nodes, at_most=None if thorough else QUICK_ROUNDS):
        partner = partner_of(node, number=number, num_nodes=topology.num_nodes)
        if partner is not None:
            peer = topology.ranks_by_node[partner][0]
            num_bytes = THOROUGH_BYTES if thorough else QUICK_BYTES
            speeds[partner] = measure_pair(transport, peer=peer, num_bytes=num_bytes)
    return speeds


def _gather(world: World, topology: Topology, speeds: dict[int, PairSpeed]) -> list[NodeLink]:
    """Returns the link of every node. Collective.

    speeds: measured speeds between this node and other nodes, by the index of the other node; empty if this rank is not
    the first rank of its node.
    """
    mine = torch.empty(0, dtype=torch.float64)
    if topology.local_rank_of(world.rank) == 0:
        slowest = min(speeds, key=lambda partner: speeds[partner].bytes_per_s)
        mine = torch.tensor(
            [
                statistics.median_high(speed.bytes_per_s for speed in speeds.values()),
                statistics.median_low(speed.latency_s for speed in speeds.values()),
                slowest,
                speeds[slowest].bytes_per_s,
            ],
            dtype=torch.float64,
        )
    firsts = {ranks[0] for ranks in topology.ranks_by_node}
    counts = [4 if rank in firsts else 0 for rank in range(topology.num_ranks)]
    rows = (
        world.all_gather(mine, counts=counts).reshape(-1, 4).tolist()
    )  # nodes are in the order of their first ranks
    return [
        NodeLink(
            bytes_per_s=rate,
            latency_s=latency,
            slowest_partner=int(slowest),
            slowest_bytes_per_s=slowest_rate,
        )
        for rate, latency, slowest, slowest_rate in rows
    ]


def _slow_pairs(
    speeds: dict[int, PairSpeed], *, node: int, links: list[NodeLink]
) -> list[tuple[int, int, float]]:
    """Returns the slow pairs of this node, each as (this node, other node, bytes per second).

    A pair is slow if messages between the two nodes are slower than those between each of them and most other nodes.
    """
    return [
        (node, partner, speed.bytes_per_s)
        for partner, speed in speeds.items()
        if node < partner
        and speed.bytes_per_s < SLOW_SHARE * min(links[node].bytes_per_s, links[partner].bytes_per_s)
    ]


def measure_ranks(world: World, *, device: torch.device) -> RankSpeeds:
    """Measures memory and arithmetic of every rank's device, on all ranks at the same time, as in training.

    Collective. The result is the median of a few trials: a rank that shares its core with another process is slow in
    all trials. Each rank receives 16 bytes per rank.
    """
    world.barrier()
    began = time.perf_counter()
    source = torch.zeros(_COPY_BYTES // 4, device=device)
    target = torch.ones_like(source)
    copy_s = _median_s(lambda: target.copy_(source), device=device, trials=_COPIES)
    world.barrier()
    matrix = torch.ones(_MATRIX, _MATRIX, device=device)
    product = torch.empty_like(matrix)
    product_s = _median_s(lambda: torch.mm(matrix, matrix, out=product), device=device, trials=_PRODUCTS)
    mine = torch.tensor([2 * _COPY_BYTES / copy_s, 2 * _MATRIX**3 / product_s], dtype=torch.float64)
    every = world.all_gather(mine, counts=[2] * world.num_ranks).reshape(-1, 2).numpy()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    world.broadcast(seconds, root=0)
    return RankSpeeds(memory_bytes_per_s=every[:, 0], flop_per_s=every[:, 1], seconds=float(seconds))


def _median_s(work: Callable[[], object], *, device: torch.device, trials: int) -> float:
    """Returns the median time of `trials` calls of `work`, in seconds, after one call that is not timed."""
    seconds = []
    for _ in range(trials + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return max(statistics.median(seconds[1:]), 1e-9)


# A communication floor that has changed by this factor since the last probe requires another one.
_CHANGED = 1.5
# After probes that find nothing, the next ones wait for longer streaks, up to this many windows.
_MOST_WINDOWS = 60


@final
class LinkWatch:
    """Decides during a run when to probe the links (`wants_probe`), and which links are slow (`probed`). Pure.

    A probe is a measurement of the links. A slow link delays the reduction on all ranks by the same time, so it does
    not show in the work of any rank. A slow link shows in the communication floor: the time for which even the last
    rank to arrive waits for the reduction. When the floor has risen, a short probe finds out whether a link is slow,
    and which link. A link is reported as slow when two consecutive probes have found it slow.

    before: links as measured at the start of the run; None: the probe in the first window measures them.
    """

    def __init__(
        self, topology: Topology, *, limits: SlowRankLimits = SlowRankLimits(), before: Links | None = None
    ) -> None:
        self._topology = topology
        self._limits = limits
        self._before = before
        self._needed = limits.windows
        self._level_s: float | None = None  # the floor when the links were measured last
        self._floor_s = 0.0
        self._step_s = 0.0
        self._streak = 0
        self._suspected: dict[tuple[str, ...], ProbeFinding] = {}
        self._named: dict[tuple[str, ...], Slow] = {}

    @property
    def named(self) -> list[Slow]:
        """The links that are slow now."""
        return list(self._named.values())

    def wants_probe(self, *, floor_s: float, step_s: float) -> bool:
        """Takes the times of a window of steps. Returns True if the links should be measured now.

        floor_s: communication floor in this window, in seconds per step.
        step_s: duration of a step in this window, in seconds.
        """
        self._floor_s, self._step_s = floor_s, step_s
        if self._before is None or self._suspected:
            return True
        if self._level_s is None:
            self._level_s = floor_s
        risen = self._matters(floor_s) and floor_s >= _CHANGED * self._level_s
        fallen = bool(self._named) and floor_s * _CHANGED <= self._level_s
        self._streak = self._streak + 1 if risen or fallen else 0
        if not self._named:
            self._level_s = min(self._level_s, floor_s)
        return self._streak >= self._needed

    def probed(self, links: Links) -> list[Change]:
        """Takes the result of a probe. Returns the changes: links that have become slow, or are no longer slow.

        The probe must follow the call of `wants_probe` that requested it.
        """
        found = {
            finding.nodes: finding
            for finding in slow_links(
                links.nodes, links.pairs, topology=self._topology,
                before=self._before.nodes if self._before is not None else None,
            )
            if finding.quantity is Quantity.BANDWIDTH  # latencies vary too much under other load
        }  # fmt: skip
        first, self._before = self._before is None, self._before or links
        level_s, self._streak = self._level_s, 0
        changes = [Change(slow, ended=True) for nodes, slow in self._named.items() if nodes not in found]
        self._named = {nodes: slow for nodes, slow in self._named.items() if nodes in found}
        new = {nodes: finding for nodes, finding in found.items() if nodes not in self._named}
        if not (new and self._matters(self._floor_s)):
            self._suspected = {}
            self._level_s = self._floor_s
            in_vain = not (first or changes)
            self._needed = min(2 * self._needed, _MOST_WINDOWS) if in_vain else self._limits.windows
            return changes
        confirmed = [nodes for nodes in new if nodes in self._suspected]
        self._suspected = {} if confirmed else new
        for nodes in confirmed:
            slow = self._slow(new[nodes], level_s=level_s)
            self._named[nodes] = slow
            changes.append(Change(slow))
        if confirmed:
            self._needed = self._limits.windows
            self._level_s = self._floor_s
        return changes

    def _matters(self, floor_s: float) -> bool:
        return floor_s >= max(self._limits.min_excess * self._step_s, LEAST_EXCESS_S)

    def _slow(self, finding: ProbeFinding, *, level_s: float | None) -> Slow:
        calm_s = level_s if level_s is not None and level_s < self._floor_s else 0.0
        return Slow(
            ranks=finding.ranks, nodes=finding.nodes, cause=SlowCause.NETWORK, value=finding.value,
            usual=finding.usual, wait_s=self._floor_s - calm_s, before=finding.before,
        )  # fmt: skip
