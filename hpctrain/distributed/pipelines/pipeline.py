"""A model in stages over the ranks: PyTorch's pipeline schedules over the process group of these ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.comm import Collective, World, agreed, broadcast_json
from hpctrain.distributed.pipelines.stages import Stages
from hpctrain.distributed.pipelines.timed_stage import gaps, timed, timed_stage
from hpctrain.distributed.plan import ParallelPlan
from hpctrain.errors import UsageError

_PIPELINE = "_hpctrain_pipeline"

# Returns the loss of which backward runs, from the output of a micro-batch and its number.
LossOf: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Returns the pipeline in which `model` is trained; None if this rank has all of the model."""
    found: Pipeline | None = getattr(model, _PIPELINE, None)
    return found


@final
class Pipeline:
    """This rank's stages of a model. Not made by users: `parallelize` attaches it to the model.

    pipelines: the world ranks of each, by stage. group: of this rank's pipeline, in this order. replicas: the ranks
    with the same stages, which compute other samples or hold other parts of them. stages: of the whole model. state:
    its `state_dict` on the meta device. bubbles: when this rank did not compute in the last `forward_backward`, begin
    and end by `time.perf_counter`.
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
        self._names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        self._shapes: list[
            tuple[tuple[int, ...], torch.dtype]
        ] = []  # of the input of each stage, and the last output
        self._schedule: Any = None
        self._stages: list[Any] = []
        self._loss_of: LossOf | None = None
        self._busy: list[tuple[float, float]] = []
        setattr(model, _PIPELINE, self)

    @property
    def own_stages(self) -> list[nn.Module]:
        """This rank's stages, each a module that computes one after another of its layers."""
        return list(self._own.values())

    @property
    def has_first(self) -> bool:
        """True if this rank has the first stage, which gets the inputs."""
        return 0 in self._own

    @property
    def has_last(self) -> bool:
        """True if this rank has the last stage, whose output is the model's."""
        return self.num_stages - 1 in self._own

    # ------------------------------------------------------------------ what a checkpoint needs

    def saves(self, name: str) -> bool:
        """True if this rank saves the parameter or buffer `name`: of each exactly one rank does."""
        return self.replicas.rank == 0 and self._first_stage.get(name, 0) in self._own

    def is_elsewhere(self, name: str) -> bool:
        """True if the parameter or buffer `name` of the model is not on this rank."""
        return name in self._first_stage and name not in self._names

    def keep_own(self, optimizer: torch.optim.Optimizer, *, names: Mapping[int, str]) -> None:
        """Gives `optimizer`, made for the whole model, the parameters that the model now has; its groups stay.

        names: of all parameters that the model had, by `id`. Raises UsageError if none of this rank's is trained.
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
        """Has the forward of this rank's stages run in the contexts that `context` makes, such as autocast."""
        for layers in self._own.values():
            layers.context = context

    def forward_backward(self, inputs: torch.Tensor | None, loss_of: LossOf) -> None:
        """Adds the gradients of all micro-batches to this rank's parameters. Collective over the pipeline's ranks.

        inputs: of the first stage, shape (micro_batches * rows, ...); None on other ranks. loss_of: called on the rank
        with the last stage for each micro-batch. `bubbles` then says when this rank did not compute.
        """
        self._loss_of = loss_of
        if self._schedule is None:
            self._make_schedule(inputs)
        self._busy.clear()
        started = time.perf_counter()
        arguments = (inputs,) if self.has_first else ()
        numbers = {"target": torch.arange(self._plan.micro_batches)} if self.has_last else {}
        self._schedule.step(*arguments, **numbers, return_outputs=False)
        self._loss_of = None
        self.bubbles = gaps(self._busy, begin=started, end=time.perf_counter())

    def forward(self, inputs: torch.Tensor | None, *, parts: int) -> torch.Tensor | None:
        """Returns the model's output on the rank with the last stage, else None. Collective over the pipeline's ranks.

        inputs: of the first stage, `parts` times as many rows as a micro-batch has, which are computed one after
        another; None on other ranks. Without gradients.
        """
        self._agree_on_shapes(inputs[: len(inputs) // parts] if inputs is not None else None)
        sent, outputs = [], []
        with torch.no_grad():
            for part in range(parts):
                values = inputs.chunk(parts)[part] if inputs is not None else None
                for number, layers in self._own.items():
                    if number > 0:
                        shape, dtype = self._shapes[number]
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

    def _agree_on_shapes(self, inputs: torch.Tensor | None) -> None:
        """Finds, once, what each stage receives, by a forward of one stage after another. Collective over the world.

        inputs: of a micro-batch, on ranks with the first stage. Raises UsageError on every rank if a stage fails. All
        ranks of a stage compute it: forward of sharded parameters and split layers is collective.
        """
        if self._shapes:
            return
        # All pipelines have the same shapes: the first one tells.
        first = self._pipelines[0]
        described = broadcast_json(
            self._world, _description(inputs) if inputs is not None else None, root=first[0]
        )
        self._shapes.append(_shape_and_dtype(described))
        for number in range(self.num_stages):
            root = first[number % len(first)]
            output = agreed(
                self._world, partial(self._try, number) if number in self._own else lambda: None,
                os_error=UsageError,
            )  # fmt: skip
            self._shapes.append(_shape_and_dtype(broadcast_json(self._world, output, root=root)))
        self._reshard()

    def _reshard(self) -> None:
        """Frees the whole parameters that FSDP2 keeps after a forward without backward."""
        if self._plan.shard == "parameters":
            from torch.distributed.fsdp import FSDPModule

            for stage in self._own.values():
                for module in stage.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    def _try(self, number: int) -> list[Any]:
        """Returns shape and dtype of what stage `number`, one of this rank's, returns. Raises UsageError."""
        shape, dtype = self._shapes[number]
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
        return _description(output)

    def _make_schedule(self, inputs: torch.Tensor | None) -> None:
        """Makes PyTorch's schedule. Collective over the world."""
        from torch.distributed import pipelining

        self._agree_on_shapes(
            inputs[: len(inputs) // self._plan.micro_batches] if inputs is not None else None
        )
        for number, layers in self._own.items():
            given, returned = (
                torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
                for shape, dtype in self._shapes[number : number + 2]
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

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._loss_of is not None
        with timed(self._busy):
            return self._loss_of(output, int(number))


class _Layers(nn.Module):
    """Layers that are called one after another. context: makes the context in which they compute."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.context: Callable[[], AbstractContextManager[object]] = nullcontext

    def forward(self, values: Any) -> Any:
        with self.context():
            for layer in self.layers:
                values = layer(values)
        return values


def _description(tensor: torch.Tensor | None) -> list[Any]:
    assert tensor is not None
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _shape_and_dtype(described: Sequence[Any]) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(described[0]), getattr(torch, described[1])


def _described(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    )
