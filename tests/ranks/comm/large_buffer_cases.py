"""What ranks do in test_large_buffers: sums of one bucket that a signed 32-bit count cannot address."""

from __future__ import annotations

import time

import torch

from hpctrain.comm import ReduceOp, World
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import run_to_end
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.topology import Topology

# What each encoding may be away from the sums of `_fill`, which all but int8 hold exactly.
TOLERANCE = {"fp32": 0.0, "fp16": 0.0, "int8": 0.02}
LOOKED_AT = 1 << 24  # elements at a time: a whole comparison would need as much memory again


def sums(world: World, cases: list[list[str]], numel: int, dtype: str) -> dict[str, float]:
    """Seconds by case of [algorithm, wire, nodes]; AssertionError where an element is not the sum.

    numel: of the bucket, on every rank. nodes: a letter for each rank's node.
    """
    took = {}
    for algorithm, wire, nodes in cases:
        begin = time.monotonic()
        topology = Topology.from_node_names(list(nodes), emulated=len(set(nodes)) > 1)
        reducer = ReducerMaker(world, topology=topology).make(Algorithm(algorithm), wire=wire)
        assert reducer.algorithm == algorithm
        (buffer,) = reducer.plan([Bucket(getattr(torch, dtype), (), numel)], device=torch.device("cpu"))
        _fill(buffer, rank=world.rank)
        run_to_end([reducer.reduce(0)])
        _check(buffer, num_ranks=world.num_ranks, tolerance=TOLERANCE[wire])
        del buffer
        reducer.close()
        took[f"{algorithm} {wire} {nodes}"] = time.monotonic() - begin
    return took


def all_reduced(world: World, numel: int) -> None:
    """The backend's own sum of `numel` bytes."""
    buffer = torch.empty(numel, dtype=torch.uint8)
    _fill(buffer, rank=world.rank)
    world.all_reduce(buffer, op=ReduceOp.SUM)
    _check(buffer, num_ranks=world.num_ranks, tolerance=0.0)


def _fill(buffer: torch.Tensor, *, rank: int) -> None:
    """(rank + 1) times 1 to 5, another number on each side of every place where a count could wrap round."""
    for number, begin in enumerate(range(0, len(buffer), LOOKED_AT)):
        buffer[begin : begin + LOOKED_AT] = (rank + 1) * (number % 5 + 1)


def _check(buffer: torch.Tensor, *, num_ranks: int, tolerance: float) -> None:
    ranks = num_ranks * (num_ranks + 1) // 2
    for number, begin in enumerate(range(0, len(buffer), LOOKED_AT)):
        part, expected = buffer[begin : begin + LOOKED_AT], ranks * (number % 5 + 1)
        low, high = float(part.min()), float(part.max())
        assert max(expected - low, high - expected) <= tolerance * expected, (begin, low, high, expected)
