"""What ranks do in test_reductions: every algorithm and wire that training offers, against a float64 sum."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from hpctrain.comm import World, all_gather_json
from hpctrain.reduce.algorithm import CODEC_WIRES, NCCL_ALGORITHMS, Algorithm
from hpctrain.reduce.buckets import Bucket
from hpctrain.reduce.make import ReducerMaker
from hpctrain.reduce.patience import run_to_end
from hpctrain.topology import Topology

SIZES = [0, 1, 3, 1000, 300_007]
SCALE = 8.0  # so that sums use a good part of float16's range and none of it overflows


def values_of(rank: int, number: int, *, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return (SCALE * torch.randn(SIZES[number], generator=generator, dtype=torch.float64)).to(dtype)


def sums(world: World, ranks_by_node: list[list[int]]) -> dict[str, Any]:
    """By algorithm, wire and dtype: what ran, its largest error over the largest magnitude, a mark of its bits."""
    names = [
        next(f"node{n}" for n, ranks in enumerate(ranks_by_node) if r in ranks)
        for r in range(world.num_ranks)
    ]
    maker = ReducerMaker(world, topology=Topology.from_node_names(names, emulated=True))
    found = {}
    for algorithm in Algorithm:
        if algorithm in NCCL_ALGORITHMS:
            continue
        for wire in CODEC_WIRES:
            for dtype in (torch.float32, torch.float64):
                name = f"{algorithm.value} {wire} {str(dtype).removeprefix('torch.')}"
                found[name] = _sum(world, maker, algorithm, wire=wire, dtype=dtype)
    return found


def _sum(
    world: World, maker: ReducerMaker, algorithm: Algorithm, *, wire: str, dtype: torch.dtype
) -> dict[str, Any]:
    reducer = maker.make(algorithm, wire=wire)
    buffers = reducer.plan([Bucket(dtype, (), size) for size in SIZES], device=torch.device("cpu"))
    marks, error = [], 0.0
    for _ in range(2):
        for number, buffer in enumerate(buffers):
            buffer.copy_(values_of(world.rank, number, dtype=dtype))
        for number in range(len(buffers)):
            run_to_end([reducer.reduce(number)])
        mark = hashlib.blake2b(digest_size=8)
        for buffer in buffers:
            mark.update(buffer.numpy().tobytes())
        marks.append(mark.hexdigest())
        reducer.settle(applied=False, rescale=1.0)  # what int8 has lost would change the second sums
    for number, buffer in enumerate(buffers):
        if not buffer.numel():
            continue
        exact = sum(values_of(r, number, dtype=dtype).double() for r in range(world.num_ranks))
        largest = max(float(values_of(r, number, dtype=dtype).abs().max()) for r in range(world.num_ranks))
        error = max(error, float((buffer.double() - exact).abs().max()) / (largest * world.num_ranks))
    what = {"ran": reducer.algorithm, "error": error, "marks": marks}
    reducer.close()
    assert all(other == what for other in all_gather_json(world, what))  # the same bits on every rank
    return what
