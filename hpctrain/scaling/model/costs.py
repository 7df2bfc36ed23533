"""Cost of one reduction by each of hpctrain's algorithms, in closed formulas. Pure functions.

In the formulas, n is the bytes of float32 gradients, and w the bytes sent per byte of float32. There are N ranks on C
nodes, R ranks on each node. A link has the latency a, and takes b seconds per byte and o seconds per message.

Sources. Ring: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002. Direct (all-to-all and all-gather of slices),
and the library's choice between recursive doubling, and reduce-scatter with all-gather: Thakur, Rabenseifner and
Gropp 2005, doi:10.1177/1094342005051521, sections 4.4 and 4.5; Rabenseifner 2004, doi:10.1007/978-3-540-24685-5_1.
Costs as sums of latency, bandwidth and computation: Chan, Heimlich, Purkayastha and van de Geijn 2007,
doi:10.1002/cpe.1206. Two levels: Jia et al. 2018, arXiv:1807.11205.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.reduce import ALGORITHM_NAMES, AUTO, find_wire
from hpctrain.scaling.model.machine import Layout, Machine, wire_share

# Of the engine, see `hpctrain/reduce/shared_memory/all_reduce_reducer.py`: bytes of a chunk, chunks in flight at once.
CHUNK_BYTES = 4 << 19
IN_FLIGHT = 4
# Of NCCL's ring between nodes: latencies of sums of at least this size for each rank count 1.9 times.
NCCL_PLATEAU_BYTES, NCCL_PLATEAU = 4096, 1.9
ALGORITHMS = tuple(name for name in ALGORITHM_NAMES if name != AUTO)
OWN_ALGORITHMS = ("ring", "direct", "hierarchical", "hierarchical-ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of one reduction, and the resources that the reduction uses.

    total_s: seconds from the moment at which the last rank has its bucket until all ranks have the sum. link_s: seconds
    for which the reduction occupies each direction of a node's link. cpu_s: processor time of each rank, for sums,
    conversions and messages, in seconds. sent_bytes: bytes that leave each node.
    """

    total_s: float
    link_s: float
    cpu_s: float
    sent_bytes: float

    @property
    def occupied_s(self) -> float:
        """The larger of `link_s` and `cpu_s`: seconds for which the reduction occupies its busiest resource."""
        return max(self.link_s, self.cpu_s)


NOTHING = Cost(total_s=0.0, link_s=0.0, cpu_s=0.0, sent_bytes=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """Time and resources that one chunk of a bucket needs.

    alone_s: seconds if no other chunk is in flight. link_s: seconds for which the chunk occupies the node's link.
    cpu_s: processor time of each rank in seconds. sent_bytes: bytes that leave each node. rounds: number of messages
    that are sent one after another, because each message depends on the previous message. apart_s: the part of `cpu_s`
    before the first message and after the last message.
    """

    alone_s: float
    link_s: float
    cpu_s: float
    sent_bytes: float
    rounds: int = 1
    apart_s: float = 0.0


def actual_algorithm(algorithm: str, layout: Layout, *, wire: str) -> str:
    """Returns the algorithm that runs if `algorithm` is asked for, as `hpctrain.reduce.choose_algorithm` decides.

    Raises UsageError if there is no cost formula for `algorithm`.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(
            f"there is no cost formula for the algorithm {algorithm!r}: choose among {', '.join(ALGORITHMS)}"
        )
    if layout.ranks == 1:
        return "flat"
    if algorithm.startswith("nccl-"):
        algorithm = "hierarchical-ring"  # what Horovod's two levels do: rings within and between nodes
    if layout.ranks_per_node == 1 and algorithm.startswith("hierarchical"):
        return "ring" if algorithm == "hierarchical-ring" else "direct"
    if layout.nodes == 1 and algorithm == "hierarchical-ring":
        return "hierarchical"
    if layout.nodes == 1 and algorithm == "hierarchical-flat":
        return "flat"
    if algorithm in ("flat", "hierarchical-flat") and _sent_as_bytes(wire):
        return "direct" if algorithm == "flat" or layout.ranks_per_node == 1 else "hierarchical"
    return algorithm


def _sent_as_bytes(wire: str) -> bool:
    """Returns True if backends do not sum the wire format, although it encodes every value."""
    found = find_wire(wire)
    return found is not None and found.codec is not None and not found.summed


def cost_of(algorithm: str, num_bytes: float, *, wire: str, layout: Layout, machine: Machine) -> Cost:
    """Returns the cost of reducing `num_bytes` of float32 gradients. Raises UsageError for an unknown name.

    hpctrain's own algorithms work on chunks, up to `IN_FLIGHT` at once. Their time is limited by the busiest resource
    or, if latency dominates, by the time of a single chunk.
    """
    if layout.ranks == 1 or num_bytes <= 0:
        return NOTHING
    runs = actual_algorithm(algorithm, layout, wire=wire)
    machine = (machine.for_own_algorithms() if runs in OWN_ALGORITHMS else machine).oversubscribed(layout)
    if runs not in OWN_ALGORITHMS:
        return _library(runs, num_bytes, wire=wire, layout=layout, machine=machine)
    num_chunks = math.ceil(num_bytes / CHUNK_BYTES)
    machine = machine.exchanging(exchanges_at_once(runs, layout) * min(num_chunks, IN_FLIGHT))
    chunk = chunk_of(runs, num_bytes / num_chunks, wire=wire, layout=layout, machine=machine)
    # While a rank sums or writes a chunk within its node, it sends nothing: the link has what was sent before.
    others = min(num_chunks, IN_FLIGHT) - 1
    idle_s = max(0.0, chunk.apart_s - others * chunk.link_s / chunk.rounds)
    busy_s = max(chunk.link_s + idle_s if chunk.link_s > 0 else 0.0, chunk.cpu_s)
    # All chunks together keep busy what is busiest, except while the first or the last message is on its way.
    apart_s = chunk.apart_s if chunk.link_s > chunk.cpu_s else 0.0
    full_s = num_chunks * busy_s + apart_s + (chunk.alone_s - busy_s - apart_s) / chunk.rounds
    # A chunk begins when the fourth one before it has ended; those under way follow each other by a message, or by what
    # a rank does for each of them before its first and after its last message.
    turns, rest = divmod(num_chunks - 1, IN_FLIGHT)
    waits_s = (1 + turns) * chunk.alone_s + rest * max(busy_s / chunk.rounds, chunk.apart_s)
    return Cost(
        total_s=max(full_s, waits_s), link_s=chunk.link_s * num_chunks,
        cpu_s=chunk.cpu_s * num_chunks, sent_bytes=chunk.sent_bytes * num_chunks,
    )  # fmt: skip


def exchanges_at_once(algorithm: str, layout: Layout) -> int:
    """Returns how many pairs of ranks send a chunk to each other through a node's link at once.

    algorithm: one of hpctrain's own algorithms. A ring has no such pairs unless the ring has two ranks, since each rank
    sends to one rank and receives from another.
    """
    if layout.nodes == 1:
        return 0
    two_levels, per_node = algorithm.startswith("hierarchical"), layout.ranks_per_node
    if algorithm.endswith("ring"):
        count = layout.nodes if two_levels else layout.ranks
        return (per_node if two_levels else 1) if count == 2 else 0
    return per_node * (layout.nodes - 1 if two_levels else layout.ranks - per_node)


def chunk_of(algorithm: str, num_bytes: float, *, wire: str, layout: Layout, machine: Machine) -> ChunkCost:
    """Returns the time and resources that a chunk of `num_bytes` needs in one of hpctrain's own algorithms."""
    per_node, share = layout.ranks_per_node, wire_share(wire)
    if algorithm == "ring":
        return _ring_chunk(num_bytes, layout.ranks, share=share, layout=layout, machine=machine)
    if algorithm == "direct":
        return _direct_chunk(num_bytes, layout.ranks, share=share, layout=layout, machine=machine)
    # Two levels: each carrier sums its part over the node's buckets, exchanges it, and writes it into all of them.
    node, part = machine.node, num_bytes / per_node
    within_s = (num_bytes / node.sum_bytes_per_s if per_node > 1 else 0.0) + (
        (per_node - 1) * part / node.sum_bytes_per_s
    )
    if layout.nodes == 1:
        return ChunkCost(
            alone_s=2 * machine.local.latency_s + within_s, link_s=0.0, cpu_s=within_s, sent_bytes=0.0
        )
    # The carriers of a node share its link.
    shared = machine.with_rate(machine.network.bytes_per_s / per_node)
    exchange = _ring_chunk if algorithm == "hierarchical-ring" else _direct_chunk
    between = exchange(part, layout.nodes, share=share, layout=Layout(layout.nodes, 1), machine=shared)
    return ChunkCost(
        alone_s=2 * machine.local.latency_s + within_s + between.alone_s,
        link_s=between.link_s,
        cpu_s=within_s + between.cpu_s,
        sent_bytes=per_node * between.sent_bytes,
        rounds=between.rounds,
        apart_s=within_s,
    )


def _direct_chunk(
    num_bytes: float, count: int, *, share: float, layout: Layout, machine: Machine
) -> ChunkCost:
    """Returns the cost of a chunk that is summed by all-to-all and all-gather: 2 a + 2 (N - 1) o + 2 R (N - R)/N n w b.

    In addition, processors move, encode, add and decode the bytes. The link starts as soon as the first message is
    ready, so that link and processor work at the same time, and the slower of the two counts.
    """
    per_node = layout.ranks_per_node
    slice_bytes, others = num_bytes / count, count - 1
    elsewhere = count - per_node
    near = others - elsewhere
    sent = 2 * per_node * elsewhere * slice_bytes * share
    network, local = machine.network, machine.local
    link_s = sent / network.bytes_per_s
    cpu_s = (
        2 * elsewhere * network.per_message_s
        + 2 * near * (local.per_message_s + slice_bytes * share / local.bytes_per_s)
        + 4 * elsewhere * slice_bytes * share / machine.node.wire_bytes_per_s
        + _sums(slice_bytes, others=others, share=share, machine=machine)
    )
    latency_s = max(network.latency_s if elsewhere else 0.0, local.latency_s if near else 0.0)
    first_s, last_s = cpu_s / others, link_s / max(1, per_node * elsewhere)
    alone_s = 2 * latency_s + max(link_s + first_s, cpu_s + last_s)
    return ChunkCost(alone_s=alone_s, link_s=link_s, cpu_s=cpu_s, sent_bytes=sent, rounds=2)


def _ring_chunk(num_bytes: float, count: int, *, share: float, layout: Layout, machine: Machine) -> ChunkCost:
    """Returns the cost of a chunk that is reduced in a ring: 2 (N - 1) (a + o + n/N w b).

    If only some hops of the ring lead to another node, a round takes as long as the busiest hop is occupied, or as the
    mean time of a hop, whichever is longer: a message that goes round the ring passes each hop once (the cycle mean of
    the max-plus matrix, Baccelli et al. 1992, theorem 3.23).
    """
    slice_bytes, rounds = num_bytes / count, 2 * (count - 1)
    network, local = machine.network, machine.local
    work_s = _sums(slice_bytes, others=count - 1, share=share, machine=machine) / rounds
    far_work = work_s + network.per_message_s + 2 * slice_bytes * share / machine.node.wire_bytes_per_s
    near_work = work_s + local.per_message_s
    far_link, near_link = slice_bytes * share / network.bytes_per_s, slice_bytes * share / local.bytes_per_s
    far_share = 0.0 if layout.nodes == 1 else layout.nodes / count
    far_s, near_s = far_work + far_link + network.latency_s, near_work + near_link + local.latency_s
    mean_s = round_s = far_share * far_s + (1 - far_share) * near_s
    if far_share > 0:
        round_s = max(round_s, far_work, far_link)
    if far_share < 1:
        round_s = max(round_s, near_work, near_link)
    alone_s = rounds * round_s
    if 0 < far_share < 1:
        stays_s = max(far_work, far_link)
        # At the ends of its way round the ring a message waits for a far hop that is still occupied.
        alone_s = max(rounds * mean_s + max(0.0, stays_s - near_s), rounds * stays_s + far_s - stays_s)
    return ChunkCost(
        alone_s=alone_s,
        rounds=rounds,
        link_s=rounds * far_link if far_share > 0 else 0.0,
        cpu_s=rounds * (far_work if far_share > 0 else near_work),
        sent_bytes=rounds * slice_bytes * share if far_share > 0 else 0.0,
    )


def _sums(slice_bytes: float, *, others: int, share: float, machine: Machine) -> float:
    """Returns the seconds to add `others` slices.

    Unless the wire is float32, this includes encoding the slices once and decoding them twice.
    """
    node = machine.node
    coding = 0.0 if share == 1.0 else 3 * others * slice_bytes / node.code_bytes_per_s
    return others * slice_bytes / node.sum_bytes_per_s + coding


def _library(algorithm: str, num_bytes: float, *, wire: str, layout: Layout, machine: Machine) -> Cost:
    """Returns the cost of the backend's own all-reduce: the quicker of recursive doubling and Rabenseifner's algorithm.

    MPI libraries switch between these (Open MPI 4.1, coll_tuned_decision_fixed.c: at 8 KiB from 4 ranks on). The
    all-reduce blocks and is not cut into chunks, so the times of link, sums and latency add up. A rank polls while it
    waits, so that its core is busy.
    """
    if algorithm == "hierarchical-flat":
        return _in_levels(num_bytes, wire=wire, layout=layout, machine=machine)
    way = _quickest(num_bytes, share=wire_share(wire), layout=layout, machine=machine)
    return _added_up(way, polls=not machine.node.offloaded)


def _quickest(num_bytes: float, *, share: float, layout: Layout, machine: Machine) -> ChunkCost:
    if machine.node.offloaded:
        return _nccl_ring(num_bytes, share=share, layout=layout, machine=machine)
    ways = (
        _doubling(num_bytes, halves=halves, share=share, layout=layout, machine=machine)
        for halves in (False, True)
    )
    return min(ways, key=lambda way: way.alone_s)


def _nccl_ring(num_bytes: float, *, share: float, layout: Layout, machine: Machine) -> ChunkCost:
    """Returns the cost by NCCL's own model of its ring: the latencies of all steps, and the bytes at the slower rate.

    Source: NCCL, src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime.
    """
    rounds, far = 2 * (layout.ranks - 1), 2 * (layout.nodes - 1)
    each_bytes = rounds / layout.ranks * num_bytes * share
    rates = [*([machine.network.bytes_per_s] if far else []),
             *([machine.local.bytes_per_s] if layout.ranks_per_node > 1 else [])]  # fmt: skip
    latency_s = far * machine.network.latency_s + (rounds - far) * machine.local.latency_s
    if far and num_bytes * share >= layout.ranks * NCCL_PLATEAU_BYTES:
        latency_s *= NCCL_PLATEAU
    alone_s = latency_s + machine.network.per_message_s + each_bytes / min(rates)
    return ChunkCost(
        alone_s=alone_s, link_s=each_bytes / machine.network.bytes_per_s if far else 0.0, cpu_s=0.0,
        sent_bytes=each_bytes if far else 0.0,
    )  # fmt: skip


def _doubling(num_bytes: float, *, halves: bool, share: float, layout: Layout, machine: Machine) -> ChunkCost:
    """Returns the cost of recursive doubling, log2 N (a + n w b).

    halves: if True, the cost of Rabenseifner's algorithm instead, 2 log2 N a + 2 (N - 1)/N n w b. Partners are at the
    distances 1, 2, 4, ..., so the first log2 R exchanges stay within the node. A number of ranks that is not a power of
    two takes two more rounds. While a link is busy, processors move the bytes; the slower of the two counts.
    """
    # Two ranks have no other partner, in whose exchange one of them could be late.
    pairs = layout.ranks_per_node if layout.ranks > 2 else 0
    turns = machine.network.exchange_factor(pairs)
    rounds = math.ceil(math.log2(layout.ranks))
    within = min(rounds, math.ceil(math.log2(layout.ranks_per_node)))
    extra = 0 if layout.ranks & (layout.ranks - 1) == 0 else 2
    waits_s = link_s = cpu_s = sent = 0.0
    for number in range(rounds + extra):
        link = machine.local if number < within else machine.network
        halved = halves and number < rounds
        moved = num_bytes * share * (2.0 ** -(number + 1) if halved else 1.0)
        times = 2 if halved else 1
        waits_s += times * link.latency_s
        cpu_s += times * link.per_message_s + moved / share / machine.node.sum_bytes_per_s
        if link is machine.network:
            through = times * layout.ranks_per_node * moved
            sent += through
            through_s = turns * through / link.bytes_per_s
            moving_s = 2 * times * moved / machine.node.wire_bytes_per_s
            link_s += through_s
            cpu_s += moving_s
            waits_s -= min(through_s, moving_s)
        else:
            waits_s += times * moved / link.bytes_per_s
    return ChunkCost(alone_s=waits_s + link_s + cpu_s, link_s=link_s, cpu_s=cpu_s, sent_bytes=sent)


def _in_levels(num_bytes: float, *, wire: str, layout: Layout, machine: Machine) -> Cost:
    """Returns the cost of two levels: reduce-scatter in the node, all-reduces of parts between nodes, all-gather."""
    share, per_node = wire_share(wire), layout.ranks_per_node
    local, node = machine.local, machine.node
    moved = (per_node - 1) / per_node * num_bytes
    cpu_s = 2 * (per_node - 1) * local.per_message_s + moved / node.sum_bytes_per_s
    waits_s = 2 * (per_node - 1) * local.latency_s + 2 * moved * share / local.bytes_per_s
    # The columns run at once: they share the node's link.
    shared = machine.with_rate(machine.network.bytes_per_s / per_node)
    column = _quickest(num_bytes / per_node, share=share, layout=Layout(layout.nodes, 1), machine=shared)
    whole = ChunkCost(
        alone_s=waits_s + cpu_s + column.alone_s, link_s=column.link_s, cpu_s=cpu_s + column.cpu_s,
        sent_bytes=per_node * column.sent_bytes,
    )  # fmt: skip
    return _added_up(whole, polls=not node.offloaded)


def _added_up(chunk: ChunkCost, *, polls: bool) -> Cost:
    """Returns the cost of a reduction that is one chunk. polls: True if a rank that waits keeps its core busy."""
    cpu_s = chunk.alone_s if polls else chunk.cpu_s
    return Cost(total_s=chunk.alone_s, link_s=chunk.link_s, cpu_s=cpu_s, sent_bytes=chunk.sent_bytes)
