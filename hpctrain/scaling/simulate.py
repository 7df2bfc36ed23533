"""Simulators: reductions over all ranks, and a job's failures, checkpoints and restarts."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UsageError
from hpctrain.reduce import ELEMENT_BYTES
from hpctrain.scaling.model.costs import CHUNK_BYTES, IN_FLIGHT, actual_algorithm, exchanges_at_once
from hpctrain.scaling.model.machine import Layout, Link, Machine, wire_share

# Simulates one reduction over all ranks, round by round: the check of the closed formulas.
#
# A round is one line of a max-plus recurrence over a vector of all ranks' clocks: a rank goes on when it
# has sent its message and received its neighbour's. So a ring of 65,536 ranks takes 131,070 rounds of a few
# vector operations; one event for each message would be 10^10 of them. Every rank has its own clock, slices
# and partners, and each node's link serves its ranks one after another; nothing here uses the formulas of
# `hpctrain.scaling.model.costs`.


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
    machine = machine.for_engine()
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
            sharing=layout.ranks_per_node if two_levels else 1, crowd=machine.crowding(layout), share=wire_share(wire),
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


# Simulates a job on nodes that fail: checkpoints, lost work, restarts, spare nodes, queue time. Needs
# simpy.
#
# Events are the failures, repairs and attempts of one job, a few thousand in a year, so a discrete-event
# simulation of processes that wait for each other is the plain way to write it (SimPy,
# https://simpy.readthedocs.io).


HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run and what happens to it. All times in seconds.

    nodes, spares: that train, and that wait in the job for one to fail. node_hours_between_failures: of one node,
    mean of an exponential distribution. repair_s: until a failed node is a spare again. interval_s: of training
    between two saves. save_s: for which a save stops training. detect_s: from a failure until it is noticed.
    restart_s: to start the ranks and load the checkpoint. queue_s: mean wait for a new allocation where nodes are
    missing; exponential.
    """

    nodes: int
    node_hours_between_failures: float
    interval_s: float
    save_s: float
    spares: int = 0
    repair_s: float = 4 * HOUR_S
    detect_s: float = 60.0
    restart_s: float = 300.0
    queue_s: float = HOUR_S

    def __post_init__(self) -> None:
        times = (self.repair_s, self.detect_s, self.restart_s, self.queue_s)
        if self.nodes < 1 or self.spares < 0 or min(times) < 0 or self.save_s < 0 or not self.interval_s > 0:
            raise UsageError("a job has at least one node, an interval above 0, and no negative time")
        if not self.node_hours_between_failures > 0:
            raise UsageError("the hours between the failures of a node must be above 0")

    @property
    def between_failures_s(self) -> float:
        """Mean seconds between failures of the nodes that train."""
        return self.node_hours_between_failures * HOUR_S / self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Shares of the time, which add up to 1. trained: that counts. saving: in saves. lost: training that was done
    again after a failure. down: detecting and restarting. queued: waiting for nodes. failures: their number."""

    trained: float
    saving: float
    lost: float
    down: float
    queued: float
    failures: int


def simulate_job(job: Job, *, hours: float, seed: int = 0) -> Outcome:
    """Simulates `hours` of the job. Raises UsageError if simpy is not installed."""
    try:
        import simpy
    except ImportError:
        raise UsageError(
            "the simulation of failures needs simpy, which is not installed: pip install 'hpctrain[predict]'"
        ) from None
    if not hours > 0:
        raise UsageError(f"{hours} hours: give a time above 0")
    environment = simpy.Environment()
    run = _Run(job, environment, interrupt=simpy.Interrupt, generator=random.Random(seed))
    environment.process(run.train())
    environment.run(until=hours * HOUR_S)
    return run.outcome(hours * HOUR_S)


@final
class _Run:
    """The processes of one simulated job, and the seconds that they have spent."""

    def __init__(
        self, job: Job, environment: Any, *, interrupt: type[Exception], generator: random.Random
    ) -> None:
        self._job = job
        self._environment = environment
        self._interrupt = interrupt
        self._random = generator
        self._spares = job.spares
        self._trained = self._saving = self._lost = self._down = self._queued = 0.0
        self._failures = 0
        self._allocation = 0
        self._repaired: Any = environment.event()

    def outcome(self, total_s: float) -> Outcome:
        unfinished = total_s - (self._trained + self._saving + self._lost + self._down + self._queued)
        return Outcome(
            trained=(self._trained + max(0.0, unfinished)) / total_s, saving=self._saving / total_s,
            lost=self._lost / total_s, down=self._down / total_s, queued=self._queued / total_s,
            failures=self._failures,
        )  # fmt: skip

    def train(self) -> Generator[Any, Any, None]:
        """Attempts, one after another; each ends with a failure."""
        while True:
            attempt = self._environment.process(self._attempt())
            self._environment.process(self._failure(attempt))
            yield attempt
            self._failures += 1
            self._environment.process(self._repair(self._allocation))
            yield from self._wait(self._job.detect_s)
            yield from self._find_node()
            yield from self._wait(self._job.restart_s)

    def _attempt(self) -> Generator[Any, Any, None]:
        """Trains and saves until it is interrupted; what was trained since the last save is lost."""
        while True:
            began = self._environment.now
            try:
                yield self._environment.timeout(self._job.interval_s)
                yield self._environment.timeout(self._job.save_s)
            except self._interrupt:
                self._lost += self._environment.now - began
                return
            self._trained += self._job.interval_s
            self._saving += self._job.save_s

    def _failure(self, attempt: Any) -> Generator[Any, Any, None]:
        yield self._environment.timeout(self._random.expovariate(1 / self._job.between_failures_s))
        attempt.interrupt()

    def _repair(self, allocation: int) -> Generator[Any, Any, None]:
        """Makes the failed node a spare again, if the job still has the allocation that it belongs to."""
        yield self._environment.timeout(self._job.repair_s)
        if allocation == self._allocation:
            self._spares += 1
            self._repaired.succeed()
            self._repaired = self._environment.event()

    def _find_node(self) -> Generator[Any, Any, None]:
        """Takes a spare node. Without one the job waits for a new allocation, with all nodes and spares, or for a
        node that is repaired earlier."""
        if self._spares == 0:
            began = self._environment.now
            queue_s = self._random.expovariate(1 / self._job.queue_s) if self._job.queue_s > 0 else 0.0
            yield self._environment.timeout(queue_s) | self._repaired
            self._queued += self._environment.now - began
            if self._spares == 0:
                self._allocation += 1
                self._spares = self._job.spares
                return
        self._spares -= 1

    def _wait(self, seconds: float) -> Generator[Any, Any, None]:
        yield self._environment.timeout(seconds)
        self._down += seconds


def sweep(
    job: Job, *, intervals_s: Sequence[float], spares: Sequence[int], hours: float, seed: int = 0
) -> dict[tuple[float, int], Outcome]:
    """Returns the outcome of each interval with each number of spare nodes, all with the same failures' seed."""
    return {
        (interval_s, count): simulate_job(
            replace(job, interval_s=interval_s, spares=count), hours=hours, seed=seed
        )
        for count in spares
        for interval_s in intervals_s
    }


# The interval between checkpoints that loses the least time, in closed form. Pure.
#
# Sources: Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37.


def young_interval(save_s: float, *, between_failures_s: float) -> float:
    """Returns sqrt(2 s M): the seconds of training between two saves that take `save_s` each."""
    _check(save_s, between_failures_s)
    return math.sqrt(2 * save_s * between_failures_s)


def daly_interval(save_s: float, *, between_failures_s: float) -> float:
    """Returns Daly's estimate of higher order, better where failures come every few saves."""
    _check(save_s, between_failures_s)
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = math.sqrt(save_s / (2 * between_failures_s))
    return (
        young_interval(save_s, between_failures_s=between_failures_s) * (1 + ratio / 3 + ratio**2 / 9)
        - save_s
    )


def expected_share(interval_s: float, save_s: float, *, restart_s: float, between_failures_s: float) -> float:
    """Returns the share of time that trains, for exponential failures: Daly 2006, equation 20."""
    _check(save_s, between_failures_s)
    mean = between_failures_s
    wall = mean * math.exp(restart_s / mean) * (math.exp((interval_s + save_s) / mean) - 1)
    return interval_s / wall


def _check(save_s: float, between_failures_s: float) -> None:
    if not save_s > 0 or not between_failures_s > 0:
        raise UsageError(
            f"a save of {save_s} s and {between_failures_s} s between failures: both must be above 0"
        )
