"""Simulates one reduction over all ranks, round by round: the check of the closed formulas.

A round is one line of a max-plus recurrence over a vector of all ranks' clocks: a rank continues when it has sent its
message and received its neighbour's. So a ring of 65,536 ranks takes 131,070 rounds of a few vector operations; one
event per message would be 10^10 of them. Every rank has its own clock, slices and partners, and each node's link serves
its ranks one after another; nothing here uses the formulas of `hpctrain.scaling.model.costs`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UsageError
from hpctrain.reduce import ELEMENT_BYTES
from hpctrain.scaling.model.costs import CHUNK_BYTES, IN_FLIGHT, actual_algorithm, exchanges_at_once
from hpctrain.scaling.model.machine import Layout, Link, Machine, wire_share

Clocks = NDArray[np.float64]
ALGORITHMS = ("ring", "direct", "hierarchical", "hierarchical-ring", "flat")


@dataclass(slots=True)
class _Ranks:
    """Clocks of all ranks, each of shape (ranks,). link: when the rank's link, or its share of its node's, is free
    again; core: when its core is."""

    link: Clocks
    core: Clocks


def simulate_reduction(
    algorithm: str,
    num_bytes: float,
    *,
    wire: str,
    layout: Layout,
    machine: Machine,
    arrival_s: Clocks | None = None,
) -> float:
    """Returns the seconds from the arrival of the last rank until all have the sum.

    num_bytes: of float32. arrival_s: of each rank, shape (ranks,); None: all at 0. Raises UsageError for algorithms
    that are not simulated.
    """
    runs = actual_algorithm(algorithm, layout, wire=wire)
    if layout.ranks == 1:
        return 0.0
    if runs not in ALGORITHMS:
        raise UsageError(f"{algorithm} is not simulated: choose among {', '.join(ALGORITHMS)}")
    arrivals = np.zeros(layout.ranks) if arrival_s is None else np.asarray(arrival_s, dtype=np.float64)
    if runs == "flat":
        return _library(num_bytes, wire=wire, layout=layout, machine=machine, arrivals=arrivals)
    machine = machine.for_own_algorithms()
    elements = math.ceil(num_bytes / ELEMENT_BYTES)
    counts = _split(elements, math.ceil(num_bytes / CHUNK_BYTES))
    machine = machine.exchanging(exchanges_at_once(runs, layout) * min(len(counts), IN_FLIGHT))
    return _engine(runs, counts, wire=wire, layout=layout, machine=machine, arrivals=arrivals)


def _split(total: int, parts: int) -> NDArray[np.int64]:
    """Even counts that add up to `total`, the larger ones first."""
    low, rest = divmod(total, parts)
    return low + (np.arange(parts) < rest)


def _engine(
    algorithm: str,
    counts: NDArray[np.int64],
    *,
    wire: str,
    layout: Layout,
    machine: Machine,
    arrivals: Clocks,
) -> float:
    """Up to IN_FLIGHT chunks at once, as in the engine; when one ends the next begins."""
    two_levels = algorithm.startswith("hierarchical")
    start = arrivals
    if two_levels:  # carriers of a node do the same at the same time: one clock for each node
        start = arrivals.reshape(layout.nodes, layout.ranks_per_node).max(axis=1) + machine.local.latency_s
    ranks = _Ranks(link=np.full(len(start), start.min()), core=start.copy())
    hop = _Hop.of(layout, machine, two_levels=two_levels, wire=wire)
    waiting = deque(counts.tolist())
    active: list[_Active] = []
    end = start

    def begin(at: Clocks) -> None:
        if waiting:
            ready = at.copy()
            active.append(_Active(ready, _chunk(algorithm, waiting.popleft(), ranks, ready, hop=hop)))

    for _ in range(IN_FLIGHT):
        begin(start)
    while active:
        # The engine goes on with what is ready first.
        chunk = min(active, key=lambda one: float(one.ready.max()))
        if next(chunk.rounds, False):
            continue
        active.remove(chunk)
        end = np.maximum(end, chunk.ready)
        begin(chunk.ready)
    return float(end.max() - arrivals.max())


@dataclass(slots=True, eq=False)
class _Active:
    """A chunk under way. ready: when each rank, or node, can go on with it."""

    ready: Clocks
    rounds: Iterator[bool]


def _chunk(algorithm: str, count: int, ranks: _Ranks, ready: Clocks, *, hop: _Hop) -> Iterator[bool]:
    """Yields True after each round, after which `ready` says when the next one can begin; ends with the chunk."""
    node, per_node = hop.machine.node, hop.layout.ranks_per_node
    part = float(count * ELEMENT_BYTES)
    if hop.two_levels:
        part /= per_node
        _work(ranks, ready, hop.crowd * (per_node - 1) * part / node.sum_bytes_per_s)
        yield True
    if len(ready) > 1:
        exchange = _ring if algorithm in ("ring", "hierarchical-ring") else _direct
        yield from exchange(ranks, ready, part / len(ready), hop=hop)
    if hop.two_levels:
        writes = per_node * part if per_node > 1 else 0.0
        _work(ranks, ready, hop.crowd * writes / node.sum_bytes_per_s)
        ready += hop.local.latency_s


def _work(ranks: _Ranks, ready: Clocks, seconds: float) -> None:
    """Every rank computes for `seconds`, on its own core, once it is ready."""
    if seconds > 0:
        np.maximum(ready, ranks.core, out=ready)
        ready += seconds
        ranks.core[:] = ready


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hop:
    """How messages travel. sharing: ranks that send through one link at once. share: wire bytes for each of float32."""

    network: Link
    local: Link
    layout: Layout
    two_levels: bool
    sharing: int
    crowd: float
    share: float
    machine: Machine

    @classmethod
    def of(cls, layout: Layout, machine: Machine, *, two_levels: bool, wire: str) -> _Hop:
        return cls(
            network=machine.network, local=machine.local, layout=layout, two_levels=two_levels,
            sharing=layout.ranks_per_node if two_levels else 1, crowd=machine.oversubscription(layout),
            share=wire_share(wire),
            machine=machine,
        )  # fmt: skip

    def work_s(self, slice_bytes: float, *, far: bool, add: bool) -> float:
        """Processor time of one message: sending it, and encoding, adding or decoding what came."""
        node, link = self.machine.node, self.network if far else self.local
        moved = 2 * slice_bytes * self.share / node.wire_bytes_per_s if far else 0.0
        coding = 0.0 if self.share == 1.0 else 1.5 * slice_bytes / node.code_bytes_per_s
        adding = slice_bytes / node.sum_bytes_per_s if add else 0.0
        return self.crowd * (link.per_message_s + moved + coding + adding)

    def successor_is_far(self, count: int) -> NDArray[np.bool_]:
        if self.two_levels or self.layout.nodes == 1:
            return np.full(count, self.two_levels)
        return (np.arange(count) + 1) % self.layout.ranks_per_node == 0


def _ring(ranks: _Ranks, ready: Clocks, slice_bytes: float, *, hop: _Hop) -> Iterator[bool]:
    """2 (N - 1) rounds: each rank sends to its successor, and goes on when its predecessor's message is there."""
    count = len(ready)
    far = hop.successor_is_far(count)
    num_bytes = slice_bytes * hop.share
    through_network = hop.sharing * num_bytes / hop.network.bytes_per_s
    sending = np.where(far, through_network, num_bytes / hop.local.bytes_per_s)
    latency = np.where(far, hop.network.latency_s, hop.local.latency_s)
    work = [
        np.where(
            far, hop.work_s(slice_bytes, far=True, add=adds), hop.work_s(slice_bytes, far=False, add=adds)
        )
        for adds in (True, False)
    ]
    sent = np.empty(count)
    core, link = ranks.core, ranks.link
    for number in range(2 * (count - 1)):
        # The core prepares the message, then the link carries it.
        np.maximum(ready, core, out=core)
        core += work[number >= count - 1]
        np.maximum(core, link, out=link)
        link += sending
        np.add(link, latency, out=sent)
        np.maximum(core[1:], sent[:-1], out=ready[1:])
        ready[0] = max(core[0], sent[-1])
        yield True


def _direct(ranks: _Ranks, ready: Clocks, slice_bytes: float, *, hop: _Hop) -> Iterator[bool]:
    """Two phases of N - 1 messages: in round k each rank sends to the k-th one after it. A phase ends for a rank when
    all its messages have come and all of its own have left."""
    count, per_node = len(ready), hop.layout.ranks_per_node
    num_bytes = slice_bytes * hop.share
    place = np.arange(count)
    mixed = not hop.two_levels and per_node > 1
    through_s = hop.sharing * num_bytes / hop.network.bytes_per_s
    arrived = np.empty(count)
    core, link = ranks.core, ranks.link
    for adds in (True, False):
        last = ready.copy()
        far_work = hop.work_s(slice_bytes, far=True, add=adds)
        near_work = hop.work_s(slice_bytes, far=False, add=adds)
        np.maximum(ready, core, out=core)
        for shift in range(1, count):
            if mixed:
                far = (place + shift) % count // per_node != place // per_node
                core += np.where(far, far_work, near_work)
                _through_shared_links(core, link, far, num_bytes, hop=hop, arrived=arrived)
            else:
                core += far_work
                np.maximum(core, link, out=link)
                link += through_s
                np.add(link, hop.network.latency_s, out=arrived)
            np.maximum(last[shift:], arrived[: count - shift], out=last[shift:])
            np.maximum(last[:shift], arrived[count - shift :], out=last[:shift])
        np.maximum(np.maximum(last, core), link, out=ready)
        yield True


def _through_shared_links(
    core: Clocks, link: Clocks, far: NDArray[np.bool_], num_bytes: float, *, hop: _Hop, arrived: Clocks
) -> None:
    """Messages of a node's ranks leave through its one link, one after another in the order of the ranks. A message
    within the node occupies its sender's core while it is copied."""
    shape = (hop.layout.nodes, hop.layout.ranks_per_node)
    cores, away, came = core.reshape(shape), far.reshape(shape), arrived.reshape(shape)
    free = link.reshape(shape).max(axis=1)
    for local in range(shape[1]):
        leaves = away[:, local]
        done = np.maximum(cores[:, local], free) + num_bytes / hop.network.bytes_per_s
        free = np.where(leaves, done, free)
        near = cores[:, local] + num_bytes / hop.local.bytes_per_s
        cores[:, local] = np.where(leaves, cores[:, local], near)
        came[:, local] = np.where(leaves, done + hop.network.latency_s, near + hop.local.latency_s)
    link.reshape(shape)[:] = free[:, None]


def _library(num_bytes: float, *, wire: str, layout: Layout, machine: Machine, arrivals: Clocks) -> float:
    """The backend's all-reduce: the quicker of recursive doubling and Rabenseifner's."""
    if layout.ranks & (layout.ranks - 1):
        raise UsageError(f"flat is simulated for powers of two only, not for {layout.ranks} ranks")
    hop = _Hop.of(layout, machine, two_levels=False, wire=wire)
    ends = [_doubling(arrivals, num_bytes, halves=halves, hop=hop) for halves in (False, True)]
    return min(float(end.max()) for end in ends) - float(arrivals.max())


def _doubling(arrivals: Clocks, num_bytes: float, *, halves: bool, hop: _Hop) -> Clocks:
    """Partners at the distance 1, 2, 4, ... exchange everything, or first halves of what is left and then the sums."""
    count, per_node = len(arrivals), hop.layout.ranks_per_node
    place = np.arange(count)
    rounds = count.bit_length() - 1
    steps = [(k, num_bytes * (2.0 ** -(k + 1) if halves else 1.0), True) for k in range(rounds)]
    if halves:
        steps += [(k, num_bytes * 2.0 ** -(k + 1), False) for k in reversed(range(rounds))]
    node, ready = hop.machine.node, arrivals
    turns = hop.network.exchange_factor(per_node if count > 2 else 0)
    for k, moved, adds in steps:
        partner = place ^ (1 << k)
        far = partner // per_node != place // per_node
        through = moved * hop.share
        sums = moved / node.sum_bytes_per_s if adds else 0.0
        work = np.where(far, hop.network.per_message_s, hop.local.per_message_s) + sums
        # All ranks of a node whose partners are elsewhere share its link, which waits for their cores if these are
        # slower.
        sends_s = turns * per_node * through / hop.network.bytes_per_s
        moves_s = hop.crowd * 2 * through / node.wire_bytes_per_s
        sending = np.where(far, max(sends_s, moves_s), through / hop.local.bytes_per_s)
        sent = ready + hop.crowd * work + sending + np.where(far, hop.network.latency_s, hop.local.latency_s)
        ready = np.maximum(sent, sent[partner])
    return ready
