"""Measures the nodes: the links between them, and each rank's memory and arithmetic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpctrain.comm import Transport, World, all_gather_json
from hpctrain.stragglers.node_pairs import PairSpeed, chosen_rounds, measure_pair, partner_of
from hpctrain.stragglers.probe_findings import SLOW_SHARE, NodeLink, RankSpeeds, SlowPair
from hpctrain.topology import Topology

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
    """The links of all nodes, by node, and the pairs that are slower than their nodes. seconds: what measuring took."""

    nodes: tuple[NodeLink, ...]
    pairs: tuple[SlowPair, ...]
    seconds: float


def measure_links(world: World, topology: Topology, *, thorough: bool) -> Links | None:
    """Measures the links between the nodes' first ranks while no rank sends anything else. Collective.

    thorough: all pairs, with large messages; else each node with at most QUICK_ROUNDS others. The result is the same on
    every rank; None for a single node, or a backend without messages of its own. Each rank receives 32 bytes for each
    node.
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
    """Returns every node's links. Collective. speeds: of this node's pairs; empty if this rank is not its first."""
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
    """Returns the pairs of this node that are slower than both nodes are with most others."""
    return [
        (node, partner, speed.bytes_per_s)
        for partner, speed in speeds.items()
        if node < partner
        and speed.bytes_per_s < SLOW_SHARE * min(links[node].bytes_per_s, links[partner].bytes_per_s)
    ]


def measure_ranks(world: World, *, device: torch.device) -> RankSpeeds:
    """Measures memory and arithmetic of every rank's device, on all ranks at once, as in training. Collective.

    The median of a few trials: a rank that shares its core with another process is slow in all of them. Each rank
    receives 16 bytes for each rank.
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
    """Returns the median time of `work`, after one call that is not timed."""
    seconds = []
    for _ in range(trials + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return max(statistics.median(seconds[1:]), 1e-9)
