"""Runs a model in stages over several ranks, with PyTorch's pipeline schedules."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.comm import Collective, World, agreed, all_gather_json, is_true_everywhere
from hpctrain.distributed.plan import ParallelPlan
from hpctrain.errors import UsageError

# PyTorch's pipeline stage, which records when it computes; the time between is the bubble.


def gaps(busy: Sequence[tuple[float, float]], *, begin: float, end: float) -> list[tuple[float, float]]:
    """Returns the intervals between `begin` and `end` that no interval of `busy` covers, in order."""
    found, at = [], begin
    for busy_begin, busy_end in sorted(busy):
        if busy_begin > at:
            found.append((at, busy_begin))
        at = max(at, busy_end)
    return [*found, (at, end)] if end > at else found


@contextmanager
def timed(busy: list[tuple[float, float]]) -> Iterator[None]:
    """Appends the start and end times of the `with` block, by `time.perf_counter`, to `busy`."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        busy.append((begin, time.perf_counter()))


def timed_stage(*arguments: Any, busy: list[tuple[float, float]], **options: Any) -> Any:
    """Returns PyTorch's `PipelineStage(*arguments, **options)`, which also records when it computes.

    The stage appends the start and end of each computation to `busy`. The sums of sharded gradients after the last
    backward of a stage count as computing. Imports torch's pipelining.
    """
    from torch.distributed.pipelining import PipelineStage

    class TimedStage(PipelineStage):
        def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
            with timed(busy):
                return super().forward_one_chunk(*arguments, **options)

        def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
            with timed(busy):
                return super().backward_one_chunk(*arguments, **options)

        def backward_weight_one_chunk(self, *arguments: Any, **options: Any) -> Any:
            with timed(busy):
                return super().backward_weight_one_chunk(*arguments, **options)

        def perform_reduce_grad(self, *arguments: Any, **options: Any) -> Any:
            with timed(busy):
                return super().perform_reduce_grad(*arguments, **options)

    return TimedStage(*arguments, **options)


# Divides the layers of a model into pipeline stages. Does not communicate.


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """A model's layers by stage. `first_stage` maps the name of each parameter and buffer in the model to its stage."""

    layers: tuple[tuple[nn.Module, ...], ...]
    first_stage: Mapping[str, int]

    @property
    def num_stages(self) -> int:
        return len(self.layers)


def divide_into_stages(model: nn.Module, layers: Sequence[nn.Module], *, num_stages: int) -> Stages:
    """Divides `model` into stages. `layers` are all layers of the model, in the order in which they are called.

    The blocks, which are the layers of the most frequent class, are divided evenly. Layers before the first block
    belong to the first stage, and any other layer to the stage of the last block before the layer. Raises UsageError if
    the blocks cannot be divided evenly, if a parameter is in no layer or in two stages, or if a layer has batch
    normalisation.
    """
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise UsageError("pipeline_layers returned no list of modules: return the model's layers, in order")
    kind, number = Counter(map(type, layers)).most_common(1)[0]
    if number % num_stages:
        raise UsageError(
            f"{number} blocks ({kind.__name__}) cannot be split into {num_stages} stages with equal numbers of "
            f"blocks: use a multiple of {num_stages} blocks, or fewer stages. Two stages are on each rank with "
            "schedule = 'interleaved' and 'zero-bubble', one with 'gpipe' and '1f1b'"
        )
    blocks = [place for place, layer in enumerate(layers) if type(layer) is kind]
    starts = [0, *blocks[number // num_stages :: number // num_stages], len(layers)]
    stages = tuple(tuple(layers[start:stop]) for start, stop in pairwise(starts))
    _check_layers(layers)
    return Stages(layers=stages, first_stage=_first_stages(model, stages))


def check_held_by_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raises UsageError if any parameter of `model` belongs to a module outside `layers`, not to one of its submodules.

    Sharding replaces parameters in the layers only; a module outside would keep the parameters that it had.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if id(module) not in inside:
                full = f"{module_name}.{name}" if module_name else name
                raise UsageError(
                    f"the parameter {full} is held by {type(module).__name__}, which is in no layer of "
                    "pipeline_layers: put it into a module that is one of the layers, or leave shard = 'parameters' out"
                )


def release_others(model: nn.Module, stages: Stages, *, own: Sequence[int]) -> None:
    """Removes from `model` the parameters and buffers that lie only in stages other than `own`.

    The remaining parameters and buffers keep their names.
    """
    kept = {id(tensor) for stage in own for layer in stages.layers[stage] for tensor in _tensors(layer)}
    everything = {id(tensor) for stage in stages.layers for layer in stage for tensor in _tensors(layer)}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if id(tensor) in everything - kept:
                    slots[name] = None


def _check_layers(layers: Sequence[nn.Module]) -> None:
    for place, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, _BatchNorm):
                raise UsageError(
                    f"layer {place} of pipeline_layers has batch normalisation ({name or type(module).__name__}): its "
                    "statistics would be those of micro-batches. Use another normalisation, such as nn.GroupNorm or "
                    "nn.LayerNorm, or leave pipeline out"
                )


def _first_stages(model: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> dict[str, int]:
    of_tensor: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        for identity in {id(tensor) for layer in stage for tensor in _tensors(layer)}:
            of_tensor.setdefault(identity, []).append(number)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = of_tensor.get(id(parameter), [])
        if not found:
            raise UsageError(
                f"the parameter {name} is in no layer of pipeline_layers: return all layers of the model, in order"
            )
        if len(found) > 1:
            raise UsageError(
                f"the parameter {name} is used in stages {found[0]} and {found[1]} of the pipeline: untie it, so that "
                "each stage has parameters of its own, or leave pipeline out"
            )
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: of_tensor[id(tensor)][0] for name, tensor in named if id(tensor) in of_tensor}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


# A model in stages over the ranks.


_PIPELINE = "_hpctrain_pipeline"

# Returns the loss for backward, from the output of a micro-batch and its index.
LossOf: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
_Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Returns the pipeline in which `model` is trained; None if this rank has all of the model."""
    found: Pipeline | None = getattr(model, _PIPELINE, None)
    return found


@final
class Pipeline:
    """This rank's stages of a model. `put_in_pipeline` attaches this object to the model; users do not create it.

    Args:
        stages: The stages of the whole model.
        state: The `state_dict` of the whole model on the meta device.
        pipelines: For each pipeline, its world ranks in the order of their stages.
        group: The process group of this rank's pipeline, whose ranks are in the order of their stages.
        replicas: The communicator of the ranks with the same stages. These ranks compute other samples, or hold other
            parts of the tensors.

    Attributes:
        bubbles: The start and end, by `time.perf_counter`, of each interval of the last `forward_backward` in which
            this rank did not compute.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        *,
        state: Mapping[str, torch.Tensor],
        world: World,
        pipelines: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        replicas: Collective,
        plan: ParallelPlan,
        device: torch.device,
    ) -> None:
        self.replicas = replicas
        self.state = state
        self.num_stages = stages.num_stages
        self._model, self._plan = model, plan
        self.bubbles: list[tuple[float, float]] = []
        self.optimizer_groups: list[list[str]] = []
        self._first_stage = stages.first_stage
        self._world, self._group, self._device = world, group, device
        self._pipelines = pipelines
        self._ranks = next(ranks for ranks in pipelines if world.rank in ranks)
        self._own = {
            number: _Layers(stages.layers[number])
            for number in range(self.num_stages)
            if self._rank_of(number) == world.rank
        }
        # All names of a tensor that has several, such as a buffer that layers share.
        self._names = {
            name
            for named in (model.named_parameters, model.named_buffers)
            for name, _ in named(remove_duplicate=False)
        }
        # Kinds of each stage's input and of the last output, by the first stage's input and whether the model trains.
        self._kinds: dict[tuple[_Kind, bool], list[_Kind]] = {}
        self._schedule: Any = None
        self._scheduled: list[_Kind] = []  # what the schedule was made for
        self._stages: list[Any] = []
        self._loss_of: LossOf | None = None
        self._busy: list[tuple[float, float]] = []
        setattr(model, _PIPELINE, self)

    @property
    def own_stages(self) -> list[nn.Module]:
        """This rank's stages. A stage is a module that calls the layers of the stage one after another."""
        return list(self._own.values())

    @property
    def has_first(self) -> bool:
        """True if this rank has the first stage, which takes the inputs."""
        return 0 in self._own

    @property
    def has_last(self) -> bool:
        """True if this rank has the last stage, whose output is the model's."""
        return self.num_stages - 1 in self._own

    # ------------------------------------------------------------------ what a checkpoint needs

    def saves(self, name: str) -> bool:
        """Returns True if this rank saves the parameter or buffer `name`. Exactly one rank saves each name."""
        return self.replicas.rank == 0 and self._first_stage.get(name, 0) in self._own

    def is_elsewhere(self, name: str) -> bool:
        """Returns True if the parameter or buffer `name` of the model is only on other ranks."""
        return name in self._first_stage and name not in self._names

    def keep_own(self, optimizer: torch.optim.Optimizer, *, names: Mapping[int, str]) -> None:
        """Replaces the parameters of `optimizer`, which was made for the whole model, by those of this rank's stages.

        The parameter groups stay.

        names: the names of all parameters of the whole model, by `id`.

        Raises UsageError if this rank has no trained parameter.
        """
        own = dict(self._model.named_parameters())
        for group in optimizer.param_groups:
            in_group = [names[id(parameter)] for parameter in group["params"]]
            self.optimizer_groups.append(in_group)
            group["params"] = [own[name] for name in in_group if name in own]
        if not any(group["params"] for group in optimizer.param_groups):
            raise UsageError(
                "a stage of the pipeline has no parameter that is trained: use fewer stages, or train its layers"
            )

    # ------------------------------------------------------------------ computing

    def compute_in(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        """Runs the forward of this rank's stages in contexts that `context` creates, such as autocast."""
        for layers in self._own.values():
            layers.context = context

    def forward_backward(self, inputs: torch.Tensor, loss_of: LossOf) -> None:
        """Adds the gradients of all micro-batches to this rank's parameters, and sets `bubbles`.

        Collective over the world.

        inputs: the inputs of the first stage, shape (micro_batches * rows, ...). Ranks without the first stage pass any
        tensor of the same shape and dtype, such as a tensor on the meta device.
        loss_of: function that returns the loss of a micro-batch from the model's output and the index of the
        micro-batch. It is called on the rank with the last stage.

        Raises UsageError on every rank if a stage cannot compute inputs of a new shape.
        """
        kinds = self._kinds_for(inputs, parts=self._plan.micro_batches)
        if self._scheduled != kinds:
            self._make_schedule(kinds)
        self._loss_of = loss_of
        self._busy.clear()
        started = time.perf_counter()
        arguments = (inputs,) if self.has_first else ()
        numbers = {"target": torch.arange(self._plan.micro_batches)} if self.has_last else {}
        self._schedule.step(*arguments, **numbers, return_outputs=False)
        self._loss_of = None
        self.bubbles = gaps(self._busy, begin=started, end=time.perf_counter())

    def forward(self, inputs: torch.Tensor, *, parts: int) -> torch.Tensor | None:
        """Returns the model's output on the rank with the last stage, else None.

        Without gradients. Collective over the world.

        inputs: the inputs of the first stage, with `parts` times the rows of a micro-batch. Ranks without the first
        stage pass any tensor of the same shape and dtype. The `parts` equal slices of the rows are computed one after
        another.

        Raises UsageError on every rank if a stage cannot compute inputs of a new shape.
        """
        kinds = self._kinds_for(inputs, parts=parts)
        sent, outputs = [], []
        with torch.no_grad():
            for part in range(parts):
                values = inputs.chunk(parts)[part]
                for number, layers in self._own.items():
                    if number > 0:
                        shape, dtype = kinds[number]
                        values = torch.empty(shape, dtype=dtype, device=self._device)
                        dist.recv(values, src=self._rank_of(number - 1), group=self._group)
                    output = layers(values)
                    if number < self.num_stages - 1:
                        to = self._rank_of(number + 1)
                        sent.append((dist.isend(output.contiguous(), dst=to, group=self._group), output))
                    else:
                        outputs.append(output)
        for work, _ in sent:
            assert work is not None
            work.wait()
        self._reshard()
        return torch.cat(outputs) if outputs else None

    # ------------------------------------------------------------------ details

    def _rank_of(self, stage: int) -> int:
        return self._ranks[stage % len(self._ranks)]

    def _kinds_for(self, inputs: torch.Tensor, *, parts: int) -> list[_Kind]:
        """Returns shape and dtype of each stage's input, and of the last output, for one of `parts` parts of `inputs`.

        All ranks of a pipeline have inputs of the same shape, so each rank knows whether the shape is new. Other
        pipelines may have inputs of other shapes. If there are other pipelines, the ranks with the same stages vote
        whether the shape is new, with 4 bytes from each rank. For a new shape the call is collective over the world.
        """
        given = (len(inputs) // parts, *inputs.shape[1:]), inputs.dtype
        key = given, self._model.training  # layers may compute less in one of the modes
        known = key in self._kinds
        if self.replicas.num_ranks > self._plan.tensor:
            known = is_true_everywhere(self.replicas, known)
        if not known:
            self._kinds[key] = self._find_kinds(given)
        return self._kinds[key]

    def _find_kinds(self, given: _Kind) -> list[_Kind]:
        """Finds what each stage receives, with a forward through one stage after another. Collective over the world.

        given: shape and dtype of the input of the first stage of this rank's pipeline. All ranks of a stage compute the
        stage, since forward is collective with sharded parameters and split layers.

        Raises UsageError on every rank if a stage fails.
        """
        kinds = [given]
        for number in range(self.num_stages):
            output = agreed(
                self._world, partial(self._try, number, kinds[number]) if number in self._own else lambda: None,
                os_error=UsageError,
            )  # fmt: skip
            shape, dtype = all_gather_json(self._world, output)[self._rank_of(number)]
            kinds.append((tuple(shape), getattr(torch, dtype)))
        self._reshard()
        return kinds

    def _reshard(self) -> None:
        """Frees the whole parameters that FSDP2 keeps after a forward without backward."""
        if self._plan.shard == "parameters":
            from torch.distributed.fsdp import FSDPModule

            for stage in self._own.values():
                for module in stage.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    def _try(self, number: int, given: _Kind) -> list[Any]:
        """Runs the stage with index `number` on zeros. Returns shape and dtype of the output as JSON values.

        given: shape and dtype of the stage's input.

        Raises UsageError if the stage fails, or does not return one tensor with the samples along dimension 0.
        """
        shape, dtype = given
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                output = self._own[number](torch.zeros(shape, dtype=dtype, device=self._device))
        except Exception as error:  # the user's layers may raise anything
            raise UsageError(
                f"stage {number} of the pipeline, on {dtype} of shape {list(shape)}, raised {type(error).__name__}: "
                f"{error}. The modules of pipeline_layers are called one after another: each takes what the one before "
                "returns"
            ) from error
        if not isinstance(output, torch.Tensor) or output.shape[:1] != shape[:1]:
            raise UsageError(
                f"stage {number} of the pipeline returned {_described(output)}: the modules of pipeline_layers return "
                f"one tensor with the samples along dimension 0, here {shape[0]}"
            )
        return [list(output.shape), str(output.dtype).removeprefix("torch.")]

    def _make_schedule(self, kinds: list[_Kind]) -> None:
        """Creates PyTorch's pipeline schedule. Collective over the pipeline's ranks.

        kinds: shape and dtype of each stage's input, and of the last output, for which buffers are allocated.
        """
        from torch.distributed import pipelining

        self._stages.clear()
        for number, layers in self._own.items():
            given, returned = (
                torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
                for shape, dtype in kinds[number : number + 2]
            )
            self._stages.append(
                timed_stage(
                    layers, number, self.num_stages, self._device, busy=self._busy, input_args=given,
                    output_args=returned, group=self._group,
                )
            )  # fmt: skip
        kind = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
        }[self._plan.schedule]
        self._schedule = kind(
            self._stages if self._plan.stages_per_rank > 1 else self._stages[0],
            n_microbatches=self._plan.micro_batches, loss_fn=self._loss, scale_grads=False,
        )  # fmt: skip
        self._scheduled = kinds

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._loss_of is not None
        with timed(self._busy):
            return self._loss_of(output, int(number))


class _Layers(nn.Module):
    """Layers that are called one after another. `context` creates the context in which they compute."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.context: Callable[[], AbstractContextManager[object]] = nullcontext

    def forward(self, values: Any) -> Any:
        with self.context():
            for layer in self.layers:
                values = layer(values)
        return values


def _described(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    )
