"""Lists the ways to split a model over the ranks, in the order in which to try them, and their costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from hpctrain.distributed import ParallelPlan, PipelineSchedule, Recomputation, ShardKind, TensorPlan, Within
from hpctrain.topology import Topology

# The share of all computing that backward repeats; for `selective` it is unknown, but small.
COMPUTED_AGAIN: dict[Recomputation, float | None] = {"none": 0.0, "selective": None, "blocks": 1 / 3}
# The keys of [parallel] in which ways differ, but for the number of micro-batches; and those in which ways differ of
# which a table shows more than one.
FAMILY_KEYS = ("shard", "shard_within", "tensor", "sequence", "offload", "pipeline")
KEYS = (*FAMILY_KEYS, "schedule", "activation_checkpointing")
# The number of micro-batches per rank that keeps the stages of a pipeline busy.
_MICRO_BATCHES_A_RANK = 4


def ways_to_split(
    topology: Topology,
    *,
    tensor_plan: TensorPlan | None = None,
    in_stages: bool = False,
    stages_of_parts: Sequence[tuple[int, int]] = (),
    offload: bool = False,
) -> list[ParallelPlan]:
    """Returns the ways to split a model over the ranks. Ways that usually cost least time come first.

    Args:
        tensor_plan: The task's plan for splitting layers; None: the layers cannot be split.
        in_stages: Whether the task names its layers, so that they can be divided into pipeline stages.
        stages_of_parts: The pairs (pipeline size, tensor group size) for pipelines with split layers.
        offload: Whether to include offload, because the ranks have GPUs.

    The order:

    - whole parameters, with more and more activations recomputed
    - sharded parameters, which are sent once more; within nodes if the ranks of a node can share them
    - split layers, which send activations within a node; then also split sequences, if the task supports that
    - pipelines, whose ranks wait for each other; then pipelines with split layers
    - offload, which copies from host memory
    """
    found = _sharded(topology)
    if tensor_plan:
        found += [
            ParallelPlan(shard=shard, shard_within=within, activation_checkpointing=saving, tensor=tensor,
                         tensor_plan=tensor_plan, sequence=sequence)
            for tensor in tensor_sizes(topology)
            for shard, within in _split_shards(topology, tensor=tensor)
            for saving in get_args(Recomputation)
            for sequence in ((False, True) if splits_sequences(tensor_plan) else (False,))
        ]  # fmt: skip
    pipelines = [(size, 1) for size in pipeline_sizes(topology)] if in_stages else []
    found += [
        ParallelPlan(
            pipeline=size, schedule=schedule, micro_batches=size, activation_checkpointing=saving, shard=shard,
            shard_within=within, tensor=tensor, tensor_plan=(tensor_plan or {}) if tensor > 1 else {},
        )
        for size, tensor in (*pipelines, *stages_of_parts)
        for saving in get_args(Recomputation)
        for shard, within in _stage_shards(topology, pipeline=size, tensor=tensor)
        for schedule in _schedules(saving)
    ]  # fmt: skip
    if offload and topology.num_ranks > 1:
        found += [
            ParallelPlan(shard="parameters", activation_checkpointing=saving, offload=True)
            for saving in get_args(Recomputation)
        ]
    return found


def tensor_sizes(topology: Topology) -> list[int]:
    """Returns the possible sizes above 1 of tensor groups, which must lie on one node, ascending."""
    return _divisors(math.gcd(*map(len, topology.ranks_by_node)))


def pipeline_sizes(topology: Topology) -> list[int]:
    """Returns the possible sizes above 1 of pipelines, ascending."""
    return _divisors(topology.num_ranks)


def splits_sequences(tensor_plan: TensorPlan) -> bool:
    """Returns True if the task says how sequences are split between its layers."""
    words = (how if isinstance(how, str) else how[0] for how in tensor_plan.values())
    return any(word in ("sequence", "sequence-gathered") for word in words)


def _sharded(topology: Topology) -> list[ParallelPlan]:
    several = topology.num_ranks > 1
    whole: list[ShardKind] = ["none", "optimizer", "gradients"] if several else ["none"]
    savings: list[Recomputation] = ["none", "selective", "blocks"]
    found = [
        ParallelPlan(shard=shard, activation_checkpointing=saving) for saving in savings for shard in whole
    ]
    if several:
        within: list[Within] = ["world"]
        if 1 < topology.num_nodes < topology.num_ranks and len(set(map(len, topology.ranks_by_node))) == 1:
            within.insert(0, "node")
        found += [
            ParallelPlan(shard="parameters", shard_within=where, activation_checkpointing=saving)
            for saving in savings
            for where in within
        ]
    return found


def _split_shards(topology: Topology, *, tensor: int) -> list[tuple[ShardKind, Within]]:
    """Returns the ways to shard parameters over the ranks that hold the same parts of layers.

    Each is a pair: what is sharded, and whether over all of these ranks or within a node.

    tensor: number of ranks per tensor group.
    """
    found: list[tuple[ShardKind, Within]] = [("none", "world")]
    if topology.num_ranks > tensor:
        sizes = set(map(len, topology.ranks_by_node))
        if topology.num_nodes > 1 and len(sizes) == 1 and min(sizes) > tensor:
            found.append(("parameters", "node"))
        found.append(("parameters", "world"))
    return found


def _stage_shards(topology: Topology, *, pipeline: int, tensor: int) -> list[tuple[ShardKind, Within]]:
    """Returns the ways to shard a pipeline stage over its data-parallel ranks.

    Each is a pair: what is sharded, and whether over all of these ranks or within a node.

    pipeline: number of ranks per pipeline.
    tensor: number of ranks per tensor group.
    """
    found: list[tuple[ShardKind, Within]] = [("none", "world")]
    replicas = topology.num_ranks // (pipeline * tensor)
    if replicas == 1:
        return found
    if tensor == 1:
        found.append(("optimizer", "world"))
    sizes = set(map(len, topology.ranks_by_node))
    of_node = min(sizes) // tensor
    if len(sizes) == 1 and 1 < of_node < replicas and replicas % of_node == 0:
        found.append(("parameters", "node"))
    return [*found, ("parameters", "world")]


def _schedules(saving: Recomputation) -> tuple[PipelineSchedule, ...]:
    # `gpipe` waits as long as `1f1b` and keeps more; the others wait less, keep more and send more.
    if saving == "selective":
        return ("1f1b", "interleaved", "gpipe")
    return ("1f1b", "interleaved", "zero-bubble", "gpipe")


def _divisors(number: int) -> list[int]:
    """Returns the divisors above 1, ascending."""
    return [size for size in range(2, number + 1) if number % size == 0]


def micro_batch_choices(plan: ParallelPlan, *, samples: int, at_least: int) -> Sequence[int]:
    """Returns the numbers of micro-batches to try for a rank's `samples`, ascending; empty if no number is possible.

    at_least: the number in the recipe; 1 if the recipe has no number. All micro-batches of a pipeline have the same
    size. If `at_least` is 1, only numbers that keep the pipeline's ranks busy are tried or, without such numbers, the
    largest.
    """
    if plan.pipeline == 1:
        return list(_without_pipeline(samples=samples, at_least=at_least))
    allowed = [n for n in range(at_least, samples + 1) if samples % n == 0 and _can_have(plan, n)]
    if at_least > 1:
        return allowed
    return [n for n in allowed if n >= _MICRO_BATCHES_A_RANK * plan.pipeline] or allowed[-1:]


def _without_pipeline(*, samples: int, at_least: int) -> Iterator[int]:
    """Yields the numbers of micro-batches to try, ascending from `at_least`.

    For each possible size of the largest micro-batch, this is the smallest number of micro-batches for a rank's
    `samples`.
    """
    yield at_least
    size = math.ceil(samples / at_least)
    while size > 1:
        parts = math.ceil(samples / (size - 1))
        yield parts
        size = math.ceil(samples / parts)


def _can_have(plan: ParallelPlan, micro_batches: int) -> bool:
    if plan.schedule == "gpipe":
        return True
    if plan.schedule == "1f1b":
        return micro_batches >= plan.pipeline
    return micro_batches % plan.pipeline == 0


def with_micro_batches(plan: ParallelPlan, micro_batches: int) -> ParallelPlan:
    """Returns the plan with this number of micro-batches if it has a pipeline, else the plan itself."""
    return replace(plan, micro_batches=micro_batches) if plan.pipeline > 1 else plan


def waiting(plan: ParallelPlan, *, micro_batches: int) -> float:
    """Returns the fraction of a step in which a pipeline rank waits; an upper bound for `zero-bubble`."""
    if plan.pipeline == 1:
        return 0.0
    others = plan.pipeline - 1
    return others / (plan.stages_per_rank * micro_batches + others)


def layout_name(plan: ParallelPlan) -> str:
    """Returns a short name, such as `parameters within node, tensor 2, blocks` or `pipeline 4 1f1b, optimizer`."""
    sharded = plan.shard + (" within node" if plan.shard_within == "node" else "")
    if plan.pipeline > 1:
        words = [f"pipeline {plan.pipeline} {plan.schedule}", *([sharded] if plan.shard != "none" else [])]
    else:
        words = [sharded]
    if plan.tensor > 1:
        words.append(f"tensor {plan.tensor}")
    words += [name for name in ("sequence", "offload") if getattr(plan, name)]
    if plan.activation_checkpointing != "none":
        words.append(plan.activation_checkpointing)
    return ", ".join(words)


def family_of(plan: ParallelPlan) -> tuple[object, ...]:
    """Returns a key that is equal for plans that differ only in activation checkpointing and schedule."""
    return tuple(getattr(plan, key) for key in FAMILY_KEYS)


def is_same_way(plan: ParallelPlan, other: ParallelPlan) -> bool:
    """Returns True if two plans differ at most in the number of micro-batches."""
    return all(getattr(plan, key) == getattr(other, key) for key in KEYS)
