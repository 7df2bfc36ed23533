"""The engine over threads, for layouts of ranks on nodes."""

from __future__ import annotations

import time

import torch

from hpctrain.comm.backends.threads_world import ThreadsWorld
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.shared_memory.all_reduce_reducer import AllReduceReducer
from hpctrain.reduce.shared_memory.shared_buckets import one_rank_nodes
from hpctrain.topology import Topology

CPU = torch.device("cpu")
OURS = [Algorithm.RING, Algorithm.DIRECT, Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_RING]
# Relative error of one encoding, against the largest value that shares a scale: for int8 that is the block's.
ROUNDING = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 254}
LAYOUTS = [
    (1,),
    (2,),
    (1, 1),
    (3,),
    (2, 1),
    (1, 1, 1),
    (4,),
    (2, 2),
    (3, 1),
    (1, 2, 1),
    (1, 1, 1, 1),
    (2, 3),
    (3, 2, 2),
]


def topology_of(ranks_per_node: tuple[int, ...]) -> Topology:
    """Round robin, so that a node's ranks are not neighbours."""
    left = list(ranks_per_node)
    names: list[str] = []
    while any(left):
        for node, count in enumerate(left):
            if count:
                names.append(f"node{node}")
                left[node] -= 1
    return Topology.from_node_names(names)


def engine(
    world: ThreadsWorld, topology: Topology, *, algorithm: Algorithm, wire: str = "fp32", feedback: bool = False,
    chunk_elems: int = 64, in_flight: int = 3,
) -> AllReduceReducer:  # fmt: skip
    two_levels = algorithm in (Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_RING)
    return AllReduceReducer(
        world.transport(topology),
        comm=world.duplicate(),
        levels=topology if two_levels else one_rank_nodes(topology.num_ranks),
        algorithm=algorithm.value,
        exchange="ring" if "ring" in algorithm.value else "direct",
        codec=codec_named(wire),
        feedback=feedback,
        chunk_elems=chunk_elems,
        in_flight=in_flight,
    )


def sum_all(reducer: BucketReducer, count: int) -> None:
    """Every bucket, all under way at once, begun in order."""
    in_flight = [reducer.reduce(number) for number in range(count)]
    while in_flight:
        progressed = False
        for one in list(in_flight):
            looked = next(one, None)
            if looked is None:
                in_flight.remove(one)
            progressed |= looked is not False
        if not progressed:
            time.sleep(50e-6)  # let the other threads run


def values_of(rank: int, numel: int, *, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def bound(values: list[torch.Tensor], *, wire: str, algorithm: Algorithm, num_nodes: int) -> float:
    """Largest error of an element: so many encodings of sums that are at most the sum of the magnitudes."""
    if not values[0].numel():
        return 0.0
    largest = float(sum(v.abs() for v in (v.double() for v in values)).max())
    encodings = num_nodes if "ring" in algorithm.value else 2
    lossy = encodings * 1.2 * ROUNDING[wire] * largest + (2.0**-24 if wire == "fp16" else 0.0)
    exact = len(values) * torch.finfo(values[0].dtype).eps * largest
    return lossy + exact
