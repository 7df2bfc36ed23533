"""What a reducer over collectives must do, as functions of one rank: on threads, and under mpirun."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.comm import World, make_two_level
from hpctrain.errors import BufferMismatch
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.collective_reducers.collective_reducer import CollectiveReducer
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, plan_buckets
from hpctrain.topology import Topology

CPU = torch.device("cpu")
# Fewer elements than ranks, none, not divisible, more than one piece; two dtypes.
SPECS = [
    GradientSpec(1, torch.float32),
    GradientSpec(0, torch.float32),
    GradientSpec(700, torch.float32),
    GradientSpec(33, torch.float64),
    GradientSpec(1291, torch.float32),
]
PIECE_ELEMS = 500
LAYOUTS = {1: ["a"], 2: ["ab", "aa"], 3: ["aab", "abc"], 4: ["aabb", "abba", "abbb"], 5: ["aabbb", "abcde"]}
# Largest error of one rounding, of the largest magnitude nearby (int8) or of the value (others).
EPSILON = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 253}
ALGORITHMS = [
    ("flat", "fp32"),
    ("flat", "fp16"),
    ("hierarchical-flat", "fp32"),
    ("hierarchical-flat", "fp16"),
    *(("direct", name) for name in EPSILON),
]


def topology_of(names: str) -> Topology:
    return Topology.from_node_names(list(names))


def buckets_for(bucket_bytes: int = 4000) -> tuple[Bucket, ...]:
    return plan_buckets(SPECS, bucket_bytes=bucket_bytes)


def make(world: World, *, names: str, algorithm: str, wire: str, feedback: bool = False) -> CollectiveReducer:
    topology = topology_of(names)
    comm = world.duplicate()
    if algorithm == "direct":
        return CollectiveReducer.direct(
            comm, topology=topology, codec=codec_named(wire), feedback=feedback, piece_elems=PIECE_ELEMS
        )
    if algorithm == "flat":
        return CollectiveReducer.flat(comm, topology=topology, wire=wire)
    levels = make_two_level(world, topology)
    return CollectiveReducer.hierarchical(comm, levels=levels, topology=topology, wire=wire)


def gradients(rank: int, bucket: Bucket) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + bucket.slots[0].parameter)
    values = torch.randn(bucket.numel, generator=generator, dtype=torch.float64)
    values[sum(slot.numel for slot in bucket.slots) :] = 0
    for slot in bucket.slots:
        values[slot.used_flag] = 1
    return values.to(bucket.dtype)


def reduce_all(reducer: CollectiveReducer, memory: Sequence[torch.Tensor]) -> None:
    """All buckets at once, and the turns after the first in another order."""
    in_flight = [reducer.reduce(number) for number in range(len(memory))]
    for generator in in_flight:
        next(generator)
    for generator in reversed(in_flight):
        assert all(isinstance(progressed, bool) for progressed in generator)


def sums_are_within_bounds(world: World, names: str, algorithm: str, wire: str) -> None:
    """Against a float64 sum; twice the same bits; the same bits on every rank; flags survive."""
    reducer = make(world, names=names, algorithm=algorithm, wire=wire)
    buckets = buckets_for()
    found: list[list[torch.Tensor]] = []
    for _ in range(2):
        memory = reducer.plan(buckets, device=CPU)
        for values, bucket in zip(memory, buckets, strict=True):
            values.copy_(gradients(world.rank, bucket))
        reduce_all(reducer, memory)
        found.append(memory)
    everywhere = world.all_gather_bytes(b"".join(m.numpy().tobytes() for m in found[0]))
    assert (reducer.algorithm, reducer.wire) == (algorithm, wire)
    assert len(set(everywhere)) == 1, "ranks differ"
    n = world.num_ranks
    for bucket, first, second in zip(buckets, *found, strict=True):
        assert torch.equal(first, second), "two runs differ"
        assert (first.shape, first.dtype) == ((bucket.numel,), bucket.dtype)
        terms = torch.stack([gradients(rank, bucket).double() for rank in range(n)])
        sizes = terms.abs().sum(0)
        if wire == "int8":
            sizes[:] = terms.abs().amax(1).sum()
        # Up, down and, for an algorithm whose every addition rounds, once for each rank.
        roundings = n + 2 if algorithm != "direct" else 2.1
        own = 2.0**-53 if bucket.dtype == torch.float64 else 2.0**-24
        bound = sizes * ((0 if n == 1 else EPSILON[wire]) * roundings + (n + 3) * own)
        error = (first.double() - terms.sum(0)).abs()
        assert bool((error <= bound).all()), f"{bucket.dtype}: {float((error - bound).max())} above the bound"
        assert all(float(first[slot.used_flag]) > 0 for slot in bucket.slots)


def all_sums(world: World) -> None:
    for names in LAYOUTS[world.num_ranks]:
        for algorithm, wire in ALGORITHMS:
            sums_are_within_bounds(world, names, algorithm, wire)


def all_sums_and_another_plan(world: World) -> str:
    all_sums(world)
    return another_plan_is_reported_to_all(world)


def another_plan_is_reported_to_all(world: World) -> str:
    """The last rank's bucket is longer."""
    specs = [GradientSpec(10 + (world.rank == world.num_ranks - 1), torch.float32)]
    reducer = make(world, names=LAYOUTS[world.num_ranks][0], algorithm="direct", wire="int8")
    try:
        reducer.plan(plan_buckets(specs, bucket_bytes=1000), device=CPU)
    except BufferMismatch as error:
        return str(error) if error.agreed else "not agreed"
    raise AssertionError("nothing was raised")
