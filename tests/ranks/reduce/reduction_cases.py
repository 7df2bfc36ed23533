"""What ranks do in test_reductions: every algorithm and wire that training offers, against a float64 sum."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import time
from typing import Any

import numpy as np
import torch

from hpctrain.comm import World, all_gather_json
from hpctrain.reduce.algorithms import NCCL_ALGORITHMS, Algorithm
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import result_of, run_to_end
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.reduce.shared_memory.all_reduce_reducer import AllReduceReducer
from hpctrain.reduce.wire_formats import CODEC_WIRES
from hpctrain.topology import Topology
from tests.uneven_ranks import fill_and_sum

SIZES = [0, 1, 3, 1000, 300_007]
SCALE = 8.0  # so that sums use a good part of float16's range and none of it overflows


@functools.cache
def values_of(rank: int, number: int, *, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings of a bucket: to read."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return (SCALE * torch.randn(SIZES[number], generator=generator, dtype=torch.float64)).to(dtype)


@functools.cache
def exact_of(number: int, *, num_ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """The sum of a bucket in float64, and `num_ranks` times the largest magnitude that any rank brings."""
    values = [values_of(rank, number, dtype=dtype) for rank in range(num_ranks)]
    largest = max((float(one.abs().max()) for one in values if one.numel()), default=0.0)
    return torch.stack([one.double() for one in values]).sum(0), largest * num_ranks


def sums(
    world: World, layouts: dict[str, list[list[int]]], in_full: str | None, late_s: float = 0.0
) -> dict[str, dict[str, dict[str, Any]]]:
    """By layout, then by algorithm, wire and dtype: what ran, its error over the largest magnitude, marks of its bits.

    layouts: ranks by node. in_full: the one with every combination; the others leave out what no layout changes.
    late_s: up to so long a rank comes late to each sum, differently in each process.
    """
    return {
        name: _sums_on(world, ranks_by_node, every=name == in_full, late_s=late_s)
        for name, ranks_by_node in layouts.items()
    }


def _sums_on(
    world: World, ranks_by_node: list[list[int]], *, every: bool, late_s: float
) -> dict[str, dict[str, Any]]:
    names = [
        next(f"node{n}" for n, ranks in enumerate(ranks_by_node) if r in ranks)
        for r in range(world.num_ranks)
    ]
    maker = ReducerMaker(world, topology=Topology.from_node_names(names, emulated=True))
    found = {}
    for algorithm in Algorithm:
        if algorithm in NCCL_ALGORITHMS or (algorithm is Algorithm.FLAT and not every):
            continue
        for wire in CODEC_WIRES:
            for dtype in (torch.float32, torch.float64) if every or wire == "fp32" else (torch.float32,):
                name = f"{algorithm.value} {wire} {str(dtype).removeprefix('torch.')}"
                found[name] = _sum(world, maker, algorithm, wire=wire, dtype=dtype, late_s=late_s)
    return found


def _sum(
    world: World, maker: ReducerMaker, algorithm: Algorithm, *, wire: str, dtype: torch.dtype, late_s: float
) -> dict[str, Any]:
    reducer = maker.make(algorithm, wire=wire)
    buffers = reducer.plan([Bucket(dtype, (), size) for size in SIZES], device=torch.device("cpu"))
    pace = random.Random(os.getpid())
    marks, error = [], 0.0
    for _ in range(2):
        for number, buffer in enumerate(buffers):
            buffer.copy_(values_of(world.rank, number, dtype=dtype))
        for number in range(len(buffers)):
            if late_s:
                time.sleep(pace.uniform(0, late_s))
            run_to_end([reducer.reduce(number)])
        mark = hashlib.blake2b(digest_size=8)
        for buffer in buffers:
            mark.update(buffer.numpy().tobytes())
        marks.append(mark.hexdigest())
        reducer.end_step(applied=False, rescale=1.0)  # what int8 has lost would change the second sums
    for number, buffer in enumerate(buffers):
        if buffer.numel():
            exact, largest = exact_of(number, num_ranks=world.num_ranks, dtype=dtype)
            error = max(error, float((buffer.double() - exact).abs().max()) / largest)
    what = {"ran": reducer.algorithm, "error": error, "marks": marks}
    reducer.close()
    assert all(other == what for other in all_gather_json(world, what))  # the same bits on every rank
    return what


def uneven(world: World) -> int:
    """On one node, every rank at its own speed, with another plan in the same memory half way; wrong sums."""
    maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
    reducer = maker.make(Algorithm.HIERARCHICAL, wire="fp32")
    assert isinstance(reducer, AllReduceReducer)
    reducer.keep_squares()
    pace = random.Random(world.rank)
    wrong = 0
    squares: list[float] = []
    for sizes in ([5, 400_000, 70_000], [300_000, 170_005]):
        buckets = plan_buckets([GradientSpec(size, torch.float32) for size in sizes], bucket_bytes=1)
        buffers = reducer.plan(buckets, device=torch.device("cpu"))
        for step in range(40):
            parts = [
                [uneven_values(rank, step, numel=buffer.numel()) for buffer in buffers]
                for rank in range(world.num_ranks)
            ]
            fill_and_sum(reducer, values=parts[world.rank], buffers=buffers, pace=pace)
            expected = parts[0]
            for part in parts[1:]:
                expected = [a + b for a, b in zip(expected, part, strict=True)]
            squares.append(result_of(reducer.finish(np.empty(0), comm=world)).norm_square)
            wrong += not all(map(torch.equal, buffers, expected))
    reducer.close()
    return wrong + (len(set(map(tuple, all_gather_json(world, squares)))) - 1)


def uneven_values(rank: int, step: int, *, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32).mul_(0.37 + rank).add_(step).sin_()
