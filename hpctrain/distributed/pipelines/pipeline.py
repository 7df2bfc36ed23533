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

from hpctrain.comm import Collective, World, agreed, all_gather_json, is_true_everywhere
from hpctrain.distributed.pipelines.stages import Stages
from hpctrain.distributed.pipelines.timed_stage import gaps, timed, timed_stage
from hpctrain.distributed.plan import ParallelPlan
from hpctrain.errors import UsageError

_PIPELINE = "_hpctrain_pipeline"

# Returns the loss of which backward runs, from the output of a micro-batch and its number.
LossOf: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
_Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


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
        # All names of a tensor that has several, such as a buffer that layers share.
        self._names = {
            name
            for named in (model.named_parameters, model.named_buffers)
            for name, _ in named(remove_duplicate=False)
        }
        # Of the input of each stage and the last output, by the first stage's input and whether the model trains.
        self._kinds: dict[tuple[_Kind, bool], list[_Kind]] = {}
        self._schedule: Any = None
        self._scheduled: list[_Kind] = []  # what the schedule was made for
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

    def forward_backward(self, inputs: torch.Tensor, loss_of: LossOf) -> None:
        """Adds the gradients of all micro-batches to this rank's parameters. Collective over the world.

        inputs: of the first stage, shape (micro_batches * rows, ...); on ranks without it any tensor of the same shape
        and dtype, such as one on the meta device. loss_of: called on the rank with the last stage for each
        micro-batch. `bubbles` then says when this rank did not compute. Raises UsageError on every rank if a stage
        cannot compute inputs of a shape that is new.
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
        """Returns the model's output on the rank with the last stage, else None. Collective over the world.

        inputs: as for `forward_backward`, but `parts` times as many rows as a micro-batch has, which are computed one
        after another. Without gradients. Raises the errors of `forward_backward`.
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
        """Returns shape and dtype of what each stage gets for one of `parts` parts of `inputs`, and of the last output.

        All ranks of a pipeline have the same inputs, so each knows whether it has seen their shape. Other pipelines may
        have others: if there are any, the ranks with the same stages tell each other, in 4 bytes. A new shape is
        collective over the world.
        """
        given = (len(inputs) // parts, *inputs.shape[1:]), inputs.dtype
        key = given, self._model.training  # layers may leave something out in training alone
        known = key in self._kinds
        if self.replicas.num_ranks > self._plan.tensor:
            known = is_true_everywhere(self.replicas, known)
        if not known:
            self._kinds[key] = self._find_kinds(given)
        return self._kinds[key]

    def _find_kinds(self, given: _Kind) -> list[_Kind]:
        """Finds what each stage receives, by a forward of one stage after another. Collective over the world.

        given: what the first stage of this rank's pipeline gets. Raises UsageError on every rank if a stage fails. All
        ranks of a stage compute it: forward of sharded parameters and split layers is collective.
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
        """Returns shape and dtype, as JSON, of what stage `number`, one of this rank's, returns. Raises UsageError."""
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
        """Makes PyTorch's schedule, whose buffers have these shapes. Collective over the pipeline's ranks."""
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


def _described(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    )
