"""Planning for 65,536 ranks, as one rank does it: seconds and bytes of memory. Nothing communicates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.memory import allocated_bytes
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.state import Header
from hpctrain.checkpoint.planning.write_plan import EvenShards, make_plan
from hpctrain.data.order.epoch_order import EpochOrder, LastBatch, PositionRange, plan_batch
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets
from hpctrain.reduce.shared_memory.shared_buckets import TwoLevelPlace, chunks_of, cut
from hpctrain.topology import Topology

NUM_RANKS = 65_536
RANKS_PER_NODE = 8
NUM_SAMPLES = 1_000_000_000
SAMPLES_PER_RANK = 32
PARAMETERS = [1 << 20] * 100
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Cost of one plan. seconds: median of `REPEATS`. num_bytes: peak of the memory allocated by Python and numpy."""

    seconds: float
    num_bytes: int


def plans(num_ranks: int = NUM_RANKS) -> Mapping[str, Callable[[], Any]]:
    """Returns what one rank plans, by name."""
    names = [f"node{rank // RANKS_PER_NODE}" for rank in range(num_ranks)]
    topology = Topology.from_node_names(names)
    rank = num_ranks // 2
    order = EpochOrder(num_samples=NUM_SAMPLES, seed=1, epoch=3)
    global_batch = SAMPLES_PER_RANK * num_ranks
    specs = [GradientSpec(numel, torch.float32) for numel in PARAMETERS]
    replicated = [
        Header(name=f"{number:03}", dtype="float32", shape=(numel,), box=None)
        for number, numel in enumerate(PARAMETERS)
    ]
    row = Box(offset=(rank, 0), shape=(1, 5056))
    generators = Header(name="generators/torch", dtype="uint8", shape=(num_ranks, 5056), box=row)

    def batch() -> Any:
        return plan_batch(
            order, span=PositionRange(7 * global_batch, 8 * global_batch), global_batch=global_batch,
            last_batch=LastBatch.PAD, rank=rank, num_ranks=num_ranks,
        )  # fmt: skip

    def reduction() -> Any:
        place = TwoLevelPlace.of(topology, rank=rank)
        buckets = plan_buckets(specs, bucket_bytes=4 << 20)
        own = [chunk for bucket in buckets for chunk in chunks_of(bucket.numel, chunk_elems=1 << 18)]
        return place, [cut(chunk, num_parts=place.num_carriers)[place.local] for chunk in own]

    def write(files: tuple[int, ...] | None) -> Any:
        shards = EvenShards.of([generators], rank=rank, num_ranks=num_ranks)
        assert shards is not None
        plan = make_plan(replicated=replicated, shards_by_rank=shards, file_of_rank=files)
        return plan.extents_of(rank), plan.pieces_in(plan.files.of_rank[rank])

    return {
        "topology": lambda: Topology.from_node_names(names).local_rank_of(rank),
        "sample order of a batch": lambda: order.at(rank * SAMPLES_PER_RANK, (rank + 1) * SAMPLES_PER_RANK),
        "batch plan": batch,
        "reduction plan": reduction,
        "write plan": lambda: write(None),
        "write plan, two tiers": lambda: write(topology.node_of_rank),
    }


def measure(plan: Callable[[], Any], *, repeats: int = REPEATS) -> Planned:
    """Runs `plan` a few times, and once more for the memory."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        plan()
        times.append(time.perf_counter() - began)
        if times[-1] > 1.0:
            break
    return Planned(seconds=median(times), num_bytes=allocated_bytes(plan))
