"""The sizes of a model, its activations and a run, from which the memory needs are calculated. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import final

import numpy as np

from hpctrain.distributed import ParallelPlan, Recomputation, ShardKind
from hpctrain.reduce import ReductionNeeds, Sent, gathered_in_a_ring
from hpctrain.topology import ParallelMesh, Topology

# The groups of ranks that share parts of a model, and what messages within them are between nodes. Pure.


@final
class RankGroups:
    """The groups of ranks for each way to split a model on one topology.

    Each group is computed once, since there may be 100,000 ranks and many ways to split a model.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        # By sizes of the axes pipeline and tensor, which decide where the ranks stand.
        self._mesh = cache(self._placed)
        self._ring_of = cache(self._gathered)
        self._far = cache(self._crossings)

    def mesh(self, plan: ParallelPlan) -> ParallelMesh:
        """Returns the mesh of the ranks for `plan`. Raises TopologyError if the ranks do not match the plan."""
        return self._mesh(plan.pipeline, plan.tensor)

    def num_data_ranks(self, plan: ParallelPlan) -> int:
        """Returns the number of ranks that hold the same stages and parts of layers and compute different samples."""
        return self._topology.num_ranks // (plan.pipeline * plan.tensor)

    def num_parts(self, plan: ParallelPlan) -> int:
        """Returns the number of ranks over which one replica of the parameters is sharded.

        If layers are split too, a replica consists of this rank's part of each layer.
        """
        if plan.shard != "parameters":
            return 1
        if plan.shard_within == "node":
            return len(self.mesh(plan).data_grid()[0])
        return self.num_data_ranks(plan)

    def ring(self, plan: ParallelPlan, *, place: int = 0, within: bool = False, across: bool = False) -> Sent:
        """Returns the bytes that a rank sends to gather one byte over the data-parallel ranks of a pipeline stage.

        place: index of the stage.
        within: gather only over the ranks of one node.
        across: gather only over one rank per node.
        """
        return self._ring_of(plan.pipeline, plan.tensor, place, within, across)

    def far_messages(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Returns, for each index i, in how many pipelines the ranks with index i and i + 1 are on different nodes.

        An index is the place of a rank in a pipeline. After the last rank follows the first rank.
        """
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


# Sizes of a model, its activations and a run, from which needs are calculated.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    """The size of a parameter.

    Attributes:
        block: The repeated block that contains the parameter; empty outside all blocks.
        state_bytes: The bytes of the optimizer's tensors that have the parameter's shape.
        other_state_bytes: The bytes of the optimizer's other tensors, which are not split.
        tensor_dim: The dimension along which the task's `tensor_plan` splits the parameter; None: not split.
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
        """Returns the largest shard's fraction of the parameter.

        The first dimension is split into `num_parts` parts, as FSDP2 does.
        """
        if num_parts == 1 or not self.shape or self.shape[0] == 0:
            return 1.0
        return math.ceil(self.shape[0] / num_parts) / self.shape[0]

    def part(self, tensor: int) -> ParameterSize:
        """Returns the part that one of `tensor` ranks holds of the parameter."""
        if self.tensor_dim is None or tensor == 1:
            return self
        dim = self.tensor_dim
        shape = (*self.shape[:dim], self.shape[dim] // tensor, *self.shape[dim + 1 :])
        return replace(self, shape=shape, state_bytes=self.state_bytes // tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model. Each parameter is listed once; `buffer_bytes` is the size of all buffers."""

    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int = 0

    @property
    def num_elements(self) -> int:
        return sum(math.prod(p.shape) for p in self.parameters)

    @property
    def num_bytes(self) -> int:
        """The bytes of the parameters."""
        return sum(p.num_bytes for p in self.parameters)

    @property
    def state_bytes(self) -> int:
        """The bytes of parameters and optimizer state, which a checkpoint holds."""
        return sum(p.num_bytes + p.state_bytes + p.other_state_bytes for p in self.parameters)

    @property
    def trained(self) -> tuple[ParameterSize, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Returns, by block, the bytes of all parameters and the bytes of the trainable parameters.

        The key "" has the parameters outside all blocks.
        """
        found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for p in self.parameters:
            whole, trainable = found[p.block]
            found[p.block] = whole + p.num_bytes, trainable + (p.num_bytes if p.trainable else 0)
        return dict(found)

    def part(self, tensor: int) -> ModelSizes:
        """Returns the part of the model that one of `tensor` ranks holds."""
        if tensor == 1:
            return self
        return replace(self, parameters=tuple(p.part(tensor) for p in self.parameters))

    def on_place(self, place: int, *, stages: StageSizes, pipeline: int) -> ModelSizes:
        """Returns the part of the model that the pipeline ranks with index `place` hold, with all of the buffers."""
        own = tuple(p for p in self.parameters if stages.stage_of[p.name] % pipeline == place)
        return replace(self, parameters=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The peak bytes of forward and backward besides parameters and gradients, as a linear function of samples."""

    fixed_bytes: float
    sample_bytes: float

    def at(self, samples: int) -> int:
        """Returns the bytes for a micro-batch of `samples` samples."""
        return max(0, math.ceil(self.fixed_bytes + samples * self.sample_bytes))


def line_through(measured: Mapping[int, int], *, besides: int = 0) -> Activations:
    """Returns the line through the bytes measured for two numbers of samples.

    If there is only one number, the line passes through the origin.

    besides: bytes per sample that were not measured and are added.
    """
    (few, few_bytes), (many, many_bytes) = min(measured.items()), max(measured.items())
    slope = (many_bytes - few_bytes) / (many - few) if many > few else many_bytes / many
    # Some bytes do not depend on the samples; a negative number of them is noise.
    slope = min(slope, many_bytes / many)
    return Activations(fixed_bytes=many_bytes - slope * many, sample_bytes=slope + besides)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """The memory of the layers of a pipeline and, as the last entry, of the loss.

    Attributes:
        kept: The bytes that each layer keeps from forward to backward, including its output.
        more: The peak bytes of each layer's backward beyond `kept`.
        output_bytes: The bytes of each layer's output per sample.
    """

    kept: tuple[Activations, ...]
    more: tuple[Activations, ...]
    output_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMessages:
    """The bytes per sample that the ranks of a tensor group sum. Bytes that are gathered or scattered count half.

    Attributes:
        forward: The bytes in forward.
        backward: The bytes in backward.
        in_blocks: The bytes of `forward` within repeated blocks.
    """

    forward: float
    in_blocks: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """The memory of one rank with layers split over `ranks` ranks, as measured, by kind of activation checkpointing.

    Attributes:
        ranks: The number of ranks over which layers are split.
        whole: The memory of a rank that has its part of every layer of the model.
        layers: The memory of a rank's parts of each layer, for pipelines; empty if not measured.
        messages: What the ranks send each other; None if not measured.
    """

    ranks: int
    whole: Mapping[Recomputation, Activations]
    layers: Mapping[Recomputation, LayerActivations] = field(default_factory=dict)
    messages: TensorMessages | None = None

    def of_one(self, whole: Activations, part: Activations, *, tensor: int) -> Activations:
        """Returns what one of `tensor` ranks holds, from measurements of whole layers and of one of `ranks` parts.

        A part of the bytes is the same for any number of ranks; the rest is divided by the number of ranks.

        whole: the measurement without split layers.
        part: the measurement with layers split over `ranks` ranks.
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
    """The measurements of forward and backward, by kind of activation checkpointing; empty where not measured.

    Attributes:
        whole: The measurements of the whole model.
        layers: The measurements of the layers of a pipeline.
        split: The measurements with split layers.
        sequence: The measurements with split layers and split sequences.
    """

    whole: Mapping[Recomputation, Activations] = field(default_factory=dict)
    layers: Mapping[Recomputation, LayerActivations] = field(default_factory=dict)
    split: MeasuredPart | None = None
    sequence: MeasuredPart | None = None

    def part(self, plan: ParallelPlan) -> MeasuredPart | None:
        """Returns the measurement for layers that are split as `plan` says."""
        return self.sequence if plan.sequence else self.split

    def activation_bytes(self, plan: ParallelPlan, *, samples: int) -> int | None:
        """Returns the bytes of a micro-batch on a rank that has all layers, or a part of each layer.

        None if activations were not measured.
        """
        saving, part = plan.activation_checkpointing, self.part(plan)
        whole = self.whole.get(saving)
        if whole is None or plan.tensor == 1:
            return None if whole is None else whole.at(samples)
        if part is None or saving not in part.whole:
            return None
        return part.of_one(whole, part.whole[saving], tensor=plan.tensor).at(samples)

    def layers_of(self, plan: ParallelPlan) -> LayerActivations | None:
        """Returns the memory of a pipeline's layers, or of a rank's parts of these layers; None if not measured."""
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
    """The sizes of the training data in host memory: samples, batches that are read ahead, and a cache."""

    sample_bytes: int = 0
    num_samples: int | None = None
    prefetch_bytes: int = 0
    cache_bytes: int = 0

    def held(self, *, samples: int, data_ranks: int) -> int:
        """Returns the bytes of training data that a rank holds.

        samples: the number of samples per step of the rank.
        data_ranks: the number of ranks with different samples.
        """
        ahead = self.prefetch_bytes
        if self.num_samples is not None:
            ahead = min(ahead, math.ceil(self.num_samples / data_ranks) * self.sample_bytes)
        return ahead + samples * self.sample_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """A division of a model into pipeline stages.

    layers: for each stage, the indices of the stage's layers in the model.
    stage_of: the stage of each parameter, by parameter name.
    """

    layers: tuple[Sequence[int], ...]
    stage_of: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSizes:
    """What decides, besides the sizes of the model, how much memory a rank needs.

    Attributes:
        micro_batches: The number of micro-batches in the recipe's section [data].
        reductions: The memory and messages that reductions other than FSDP2's need, by what is sharded.
        sharded_sum: The algorithm and the wire format by which sharded gradients are summed.
        measured: The measurements of forward and backward.
        stages: The divisions of the model into stages, by number of stages.
        loader: The sizes of the data; None: the calculated memory, such as that of a GPU, does not hold the data.
        snapshot: Whether a save in the background copies the rank's share of the state into this memory.
        update_at_once: Whether the optimizer's step creates temporary tensors for all parameters at once, as on GPUs,
            or for one parameter after the other.
        averages: Whether the run averages its parameters (`optimizer.ema`).
        groups: The rank groups of the topology.
    """

    topology: Topology
    global_batch: int
    micro_batches: int = 1
    reductions: Mapping[ShardKind, ReductionNeeds]
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
        """Returns the number of samples per step of a rank, if `ranks_of_a_sample` ranks compute the same samples."""
        return math.ceil(self.global_batch / (self.topology.num_ranks // ranks_of_a_sample))


def in_decimal_units(num_bytes: float) -> str:
    """Returns bytes as text, for example `1.23 GB` or `45 MB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if abs(num_bytes) >= unit:
            number = num_bytes / unit
            return f"{number:.0f} {name}" if abs(number) >= 100 else f"{number:.3g} {name}"
    return f"{num_bytes:.0f} B"
