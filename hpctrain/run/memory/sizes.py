"""Sizes of a model, its activations and a run, from which needs are calculated. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import final

import numpy as np

from hpctrain.distributed import Checkpointing, ParallelPlan, Shard
from hpctrain.reduce import ReductionNeeds, Sent, gathered_in_a_ring
from hpctrain.topology import ParallelMesh, Topology

# The groups of ranks that share parts of a model, and what messages within them are between nodes. Pure.


@final
class RankGroups:
    """The groups of one topology. Each is found once: there may be 100,000 ranks, and many ways to split a model."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        # By sizes of the axes pipeline and tensor, which decide where the ranks stand.
        self._mesh = cache(self._placed)
        self._ring_of = cache(self._gathered)
        self._far = cache(self._crossings)

    def mesh(self, plan: ParallelPlan) -> ParallelMesh:
        """Returns where the ranks stand. Raises TopologyError if they do not fit."""
        return self._mesh(plan.pipeline, plan.tensor)

    def num_data_ranks(self, plan: ParallelPlan) -> int:
        """Returns the number of ranks that compute different samples with the same stages and parts of layers."""
        return self._topology.num_ranks // (plan.pipeline * plan.tensor)

    def num_parts(self, plan: ParallelPlan) -> int:
        """Returns the number of ranks that share a copy of the parameters, or of their part of the layers."""
        if plan.shard != "parameters":
            return 1
        if plan.shard_within == "node":
            return len(self.mesh(plan).data_grid()[0])
        return self.num_data_ranks(plan)

    def ring(self, plan: ParallelPlan, *, place: int = 0, within: bool = False, across: bool = False) -> Sent:
        """Returns what a rank sends to gather a byte over the data-parallel ranks of the stage `place`.

        within: over those of one node. across: over one on each node.
        """
        return self._ring_of(plan.pipeline, plan.tensor, place, within, across)

    def far_messages(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Returns for each rank of a pipeline how many pipelines have the next rank on another node; after the last
        comes the first."""
        return self._far(plan.pipeline, plan.tensor)

    def _placed(self, pipeline: int, tensor: int) -> ParallelMesh:
        return ParallelMesh.plan(self._topology, pipeline=pipeline, tensor=tensor)

    def _gathered(self, pipeline: int, tensor: int, place: int, within: bool, across: bool) -> Sent:
        mesh = self._mesh(pipeline, tensor)
        if within:
            ranks = mesh.data_grid(stage=place)[0]
        elif across:
            ranks = tuple(node[0] for node in mesh.data_grid(stage=place))
        else:
            ranks = mesh.data_ranks(stage=place)
        return gathered_in_a_ring(1.0, ranks=ranks, topology=self._topology)

    def _crossings(self, pipeline: int, tensor: int) -> tuple[int, ...]:
        ranks = np.array(self._mesh(pipeline, tensor).ranks).reshape(pipeline, -1)
        nodes = np.array(self._topology.node_of_rank)[ranks]  # (pipeline, pipelines)
        return tuple((nodes != np.roll(nodes, -1, axis=0)).sum(axis=1).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    """A parameter. block: name of the repeated block that it is in, empty outside of all.

    state_bytes: of the optimizer's tensors of the parameter's shape; other_state_bytes: of its other tensors, which
    are not split. tensor_dim: the dimension along which the task's `tensor_plan` splits it; None: it does not.
    """

    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True
    block: str = ""
    state_bytes: int = 0
    other_state_bytes: int = 0
    name: str = ""
    tensor_dim: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def share(self, num_parts: int) -> float:
        """Returns the largest part's share if the first dimension is split into `num_parts`, as FSDP2 does."""
        if num_parts == 1 or not self.shape or self.shape[0] == 0:
            return 1.0
        return math.ceil(self.shape[0] / num_parts) / self.shape[0]

    def part(self, tensor: int) -> ParameterSize:
        """Returns what one of `tensor` ranks has that hold a layer."""
        if self.tensor_dim is None or tensor == 1:
            return self
        dim = self.tensor_dim
        shape = (*self.shape[:dim], self.shape[dim] // tensor, *self.shape[dim + 1 :])
        return replace(self, shape=shape, state_bytes=self.state_bytes // tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """parameters: each one once. buffer_bytes: of all buffers."""

    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int = 0

    @property
    def num_elements(self) -> int:
        return sum(math.prod(p.shape) for p in self.parameters)

    @property
    def num_bytes(self) -> int:
        """Of the parameters."""
        return sum(p.num_bytes for p in self.parameters)

    @property
    def state_bytes(self) -> int:
        """Of parameters and optimizer, which a checkpoint holds."""
        return sum(p.num_bytes + p.state_bytes + p.other_state_bytes for p in self.parameters)

    @property
    def trained(self) -> tuple[ParameterSize, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Returns bytes of all and of the trainable parameters for each block, and with the name "" of the rest."""
        found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for p in self.parameters:
            whole, trainable = found[p.block]
            found[p.block] = whole + p.num_bytes, trainable + (p.num_bytes if p.trainable else 0)
        return dict(found)

    def part(self, tensor: int) -> ModelSizes:
        """Returns what one of `tensor` ranks has that hold a layer."""
        if tensor == 1:
            return self
        return replace(self, parameters=tuple(p.part(tensor) for p in self.parameters))

    def on_place(self, place: int, *, stages: StageSizes, pipeline: int) -> ModelSizes:
        """Returns what the ranks of a pipeline have whose first stage is `place`, with all buffers."""
        own = tuple(p for p in self.parameters if stages.stage_of[p.name] % pipeline == place)
        return replace(self, parameters=own)


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
class LayerActivations:
    """Of the layers of a pipeline and, last, of the loss: what each keeps from forward to backward, its output
    included, what its backward needs beyond that at its most, and the bytes of the output for one sample."""

    kept: tuple[Activations, ...]
    more: tuple[Activations, ...]
    output_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMessages:
    """Bytes for one sample that the ranks of a tensor group sum: in forward, of it within repeated blocks, and in
    backward. What is gathered counts half."""

    forward: float
    in_blocks: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """What was measured, by activation checkpointing, of what one of `ranks` ranks has that hold a layer.

    layers: for pipelines; empty where they were not measured.
    """

    ranks: int
    whole: Mapping[Checkpointing, Activations]
    layers: Mapping[Checkpointing, LayerActivations] = field(default_factory=dict)
    messages: TensorMessages | None = None

    def of_one(self, whole: Activations, part: Activations, *, tensor: int) -> Activations:
        """Returns what one of `tensor` ranks has: some is the same with any number of ranks, the rest is divided.

        whole: without split layers. part: with `ranks` of them.
        """

        def bytes_of(most: float, less: float) -> float:
            divided = min(most, max(0.0, (most - less) * self.ranks / (self.ranks - 1)))
            return most - divided + divided / tensor

        return Activations(
            fixed_bytes=bytes_of(whole.fixed_bytes, part.fixed_bytes),
            sample_bytes=bytes_of(whole.sample_bytes, part.sample_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of forward and backward, by activation checkpointing; empty where it was not.

    layers: for pipelines. split: with split layers. sequence: with split layers and sequences.
    """

    whole: Mapping[Checkpointing, Activations] = field(default_factory=dict)
    layers: Mapping[Checkpointing, LayerActivations] = field(default_factory=dict)
    split: MeasuredPart | None = None
    sequence: MeasuredPart | None = None

    def part(self, plan: ParallelPlan) -> MeasuredPart | None:
        """Returns what was measured of the layers as `plan` splits them."""
        return self.sequence if plan.sequence else self.split

    def activation_bytes(self, plan: ParallelPlan, *, samples: int) -> int | None:
        """Returns the bytes of a micro-batch on a rank that has all layers, or parts of all; None if not measured."""
        saving, part = plan.activation_checkpointing, self.part(plan)
        whole = self.whole.get(saving)
        if whole is None or plan.tensor == 1:
            return None if whole is None else whole.at(samples)
        if part is None or saving not in part.whole:
            return None
        return part.of_one(whole, part.whole[saving], tensor=plan.tensor).at(samples)

    def layers_of(self, plan: ParallelPlan) -> LayerActivations | None:
        """Returns what the layers of a pipeline hold, or a rank's parts of them; None if not measured."""
        saving, part = plan.activation_checkpointing, self.part(plan)
        whole = self.layers.get(saving)
        if whole is None or plan.tensor == 1:
            return whole
        if part is None or saving not in part.layers:
            return None
        of_one, parts = partial(part.of_one, tensor=plan.tensor), part.layers[saving]
        return LayerActivations(
            kept=tuple(map(of_one, whole.kept, parts.kept)),
            more=tuple(map(of_one, whole.more, parts.more)),
            output_bytes=whole.output_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSizes:
    """Of the training data, on the host: bytes and number of samples, of batches read ahead, and of a cache."""

    sample_bytes: int = 0
    num_samples: int | None = None
    prefetch_bytes: int = 0
    cache_bytes: int = 0

    def held(self, *, samples: int, data_ranks: int) -> int:
        """Returns what a rank holds that computes `samples` in a step, one of `data_ranks` with different samples."""
        ahead = self.prefetch_bytes
        if self.num_samples is not None:
            ahead = min(ahead, math.ceil(self.num_samples / data_ranks) * self.sample_bytes)
        return ahead + samples * self.sample_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """A model as stages of a pipeline. layers: of each stage, its numbers among the model's layers. stage_of: by name
    of a parameter."""

    layers: tuple[Sequence[int], ...]
    stage_of: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSizes:
    """What besides the model decides what a rank needs.

    micro_batches: of the recipe's section [data]. reductions: of gradients that are not reduced by FSDP2, by what is
    sharded. sharded_sum: algorithm and wire format of those that are. stages: by number of stages. loader: None: not in
    this memory. snapshot: whether a save in the background keeps a copy of the rank's share of the state in this
    memory. update_at_once: whether the optimizer's step makes temporary tensors of all parameters at once, as on GPUs,
    or of one after the other. averages: whether there are averages of the parameters (`optimizer.ema`). groups: of the
    topology.
    """

    topology: Topology
    global_batch: int
    micro_batches: int = 1
    reductions: Mapping[Shard, ReductionNeeds]
    sharded_sum: tuple[str, str] = ("auto", "fp32")
    measured: Measured = Measured()
    stages: Mapping[int, StageSizes] = field(default_factory=dict)
    loader: LoaderSizes | None = None
    snapshot: bool = False
    update_at_once: bool = False
    averages: bool = False
    groups: RankGroups = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", RankGroups(self.topology))

    def samples(self, *, ranks_of_a_sample: int = 1) -> int:
        """Returns the samples of a rank in a step, if so many ranks compute the same ones."""
        return math.ceil(self.global_batch / (self.topology.num_ranks // ranks_of_a_sample))


def in_decimal_units(num_bytes: float) -> str:
    """For example `1.23 GB`, `45 MB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if abs(num_bytes) >= unit:
            number = num_bytes / unit
            return f"{number:.0f} {name}" if abs(number) >= 100 else f"{number:.3g} {name}"
    return f"{num_bytes:.0f} B"
