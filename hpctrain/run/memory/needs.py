"""What a rank needs for each way to split a model: memory and traffic, by formulas. Pure.

The sources of the formulas are Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, and what FSDP2 allocates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.distributed import Checkpointing, ParallelPlan
from hpctrain.reduce import ReductionNeeds
from hpctrain.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    """A parameter. block: name of the repeated block that it is in, empty outside of all.

    state_bytes: of the optimizer's tensors of the parameter's shape; other_state_bytes: of its other tensors, which
    are not split.
    """

    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True
    block: str = ""
    state_bytes: int = 0
    other_state_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def share(self, num_parts: int) -> float:
        """Returns the largest part's share if the first dimension is split into `num_parts`, as FSDP2 does."""
        if num_parts == 1 or not self.shape or self.shape[0] == 0:
            return 1.0
        return math.ceil(self.shape[0] / num_parts) / self.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """parameters: each one once. buffer_bytes: of all buffers."""

    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int = 0

    @property
    def num_elements(self) -> int:
        return sum(math.prod(p.shape) for p in self.parameters)

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Returns bytes of all and of the trainable parameters for each block, and with the name "" of the rest."""
        found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for p in self.parameters:
            whole, trainable = found[p.block]
            found[p.block] = whole + p.num_bytes, trainable + (p.num_bytes if p.trainable else 0)
        return dict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes alive at once in forward and backward, besides parameters and their gradients: a straight line."""

    fixed_bytes: float
    sample_bytes: float

    def at(self, samples: int) -> int:
        """Returns the bytes for a micro-batch of `samples`."""
        return max(0, math.ceil(self.fixed_bytes + samples * self.sample_bytes))


def line_through(measured: Mapping[int, int], *, besides: int = 0) -> Activations:
    """Returns the line through the bytes measured for two numbers of samples; with one number, through the origin.

    besides: bytes of a sample that were not measured.
    """
    (few, few_bytes), (many, many_bytes) = min(measured.items()), max(measured.items())
    slope = (many_bytes - few_bytes) / (many - few) if many > few else many_bytes / many
    # At each moment some bytes are fixed: that they are fewer than none is noise.
    slope = min(slope, many_bytes / many)
    return Activations(fixed_bytes=many_bytes - slope * many, sample_bytes=slope + besides)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSizes:
    """What besides the model decides what a rank needs.

    samples: of a rank in a step. micro_batches: of the recipe. reduction: of whole gradients, without FSDP2.
    activations: by activation checkpointing; empty if they were not measured. data_bytes: of batches read ahead.
    snapshot: whether a save in the background keeps a copy of the rank's share of the state in this memory.
    update_at_once: whether the optimizer's step makes temporary tensors of all parameters at once, as on GPUs, or of
    one after the other.
    """

    topology: Topology
    samples: int
    micro_batches: int
    reduction: ReductionNeeds
    activations: Mapping[Checkpointing, Activations] = field(default_factory=dict)
    data_bytes: int = 0
    snapshot: bool = False
    update_at_once: bool = False

    @property
    def micro_batch(self) -> int:
        """Samples of the largest micro-batch."""
        return math.ceil(self.samples / self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes of the rank that needs most.

    whole: parameters and gradients of blocks that are whole while they are computed. update: temporary tensors of the
    optimizer's step, when activations are freed. start: of the whole model before it is split. activations: None if
    they were not measured. sent: to other ranks in a step; sent_between_nodes: of it, to other nodes.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    whole: int
    reduction: int
    data: int
    snapshot: int
    update: int
    start: int
    activations: Activations | None
    sent: int
    sent_between_nodes: int

    def activation_bytes(self, samples: int) -> int:
        return self.activations.at(samples) if self.activations is not None else 0

    def total(self, samples: int) -> int:
        """Returns the most bytes at any time with micro-batches of `samples`."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        held += self.reduction + self.data + self.snapshot
        return max(held + max(self.whole + self.activation_bytes(samples), self.update), self.start)

    def other(self, samples: int) -> int:
        """Returns what of the total is not parameters, gradients, optimizer or activations."""
        shown = self.parameters + self.gradients + self.optimizer + self.activation_bytes(samples)
        return self.total(samples) - shown

    def largest_micro_batch(self, memory: int, *, at_most: int) -> int:
        """Returns the most samples, up to `at_most`, with which the total is at most `memory`; 0 if none are."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.total(middle) <= memory:
                low = middle
            else:
                high = middle - 1
        return low


def ways_to_split(topology: Topology) -> list[ParallelPlan]:
    """Returns the ways in the order in which to try them: what costs least time first.

    Activation checkpointing computes a third more; sharded parameters are sent once more, within nodes if a node's
    ranks share them.
    """
    sharded = []
    if topology.num_ranks > 1:
        sharded = [ParallelPlan(shard="parameters")]
        if 1 < topology.num_nodes < topology.num_ranks:
            sharded.insert(0, ParallelPlan(shard="parameters", shard_within="node"))
    saving = [
        ParallelPlan(shard=plan.shard, shard_within=plan.shard_within, activation_checkpointing="blocks")
        for plan in (ParallelPlan(), *sharded)
    ]
    return [ParallelPlan(), saving[0], *sharded, *saving[1:]]


def needs_of(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> Needs:
    """Returns what a rank needs to train `model` as `plan` says."""
    parts = _num_parts(plan, run.topology)
    split = plan.shard != "none"
    trained = [p for p in model.parameters if p.trainable]
    parameters = _bytes(model.parameters, parts)
    optimizer = math.ceil(sum(p.state_bytes * p.share(parts) + p.other_state_bytes for p in trained))
    state = sum(p.num_bytes + p.state_bytes + p.other_state_bytes for p in model.parameters)
    largest = max((math.ceil(p.num_bytes * p.share(parts)) for p in trained), default=0)
    sent, far = run.reduction.sent, run.reduction.sent_between_nodes
    if split:
        sent, far = _sent_by_shards(plan, model, run)
    whole_model = sum(p.num_bytes for p in model.parameters) + model.buffer_bytes
    return Needs(
        parameters=parameters,
        gradients=_bytes(trained, parts) if split else run.reduction.buckets,
        optimizer=optimizer,
        buffers=model.buffer_bytes,
        whole=_whole_blocks(model) if split else 0,
        reduction=0 if split else run.reduction.wire + run.reduction.residuals,
        data=run.data_bytes,
        # Each rank writes its share of the state, also where all have the same.
        snapshot=math.ceil(state / run.topology.num_ranks) if run.snapshot else 0,
        # Adam's denominator: a square root and a quotient.
        update=_bytes(trained, parts) if run.update_at_once else 2 * largest,
        start=whole_model + parameters if split else whole_model,
        activations=run.activations.get(plan.activation_checkpointing),
        sent=sent,
        sent_between_nodes=far,
    )


def _num_parts(plan: ParallelPlan, topology: Topology) -> int:
    if plan.shard == "none":
        return 1
    return topology.num_ranks if plan.shard_within == "world" else min(map(len, topology.ranks_by_node))


def _bytes(parameters: Sequence[ParameterSize], num_parts: int) -> int:
    return math.ceil(sum(p.num_bytes * p.share(num_parts) for p in parameters))


def _whole_blocks(model: ModelSizes) -> int:
    """Returns the bytes that FSDP2 holds whole at most, in backward.

    What is in no block stays whole from forward on, and gets its gradients until backward ends. Of a block there are
    the parameters and gradients, and the parameters of the next one, or the gradients once more, in the buffer that is
    sent.
    """
    blocks = model.blocks()
    rest, rest_trained = blocks.pop("", (0, 0))
    if not blocks:
        return rest + max(rest, rest_trained)
    largest = max(whole for whole, _ in blocks.values())
    return rest + rest_trained + 2 * largest + max(trained for _, trained in blocks.values())


def _sent_by_shards(plan: ParallelPlan, model: ModelSizes, run: RunSizes) -> tuple[int, int]:
    """Returns the bytes that a rank sends in a step with sharded parameters, and of them those to other nodes.

    Each micro-batch gathers blocks in forward and in backward, and the rest in forward, and reduces all gradients.
    """
    topology = run.topology
    parts, num_nodes = _num_parts(plan, topology), topology.num_nodes
    blocks = model.blocks()
    rest, _ = blocks.pop("", (0, 0))
    gathered = rest + 2 * sum(whole for whole, _ in blocks.values())
    gradients = sum(p.num_bytes for p in model.parameters if p.trainable)
    sent = (gathered + gradients) * (parts - 1) / parts
    if plan.shard_within == "node":
        between = 2 * gradients / parts * (num_nodes - 1) / num_nodes
        sent += between
    else:
        # In a ring over the ranks in order, one rank of each node sends to another node.
        between = sent * num_nodes / topology.num_ranks if num_nodes > 1 else 0.0
    return math.ceil(sent * run.micro_batches), math.ceil(between * run.micro_batches)
