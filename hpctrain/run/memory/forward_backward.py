"""Measures the memory of forward and backward of a recipe's task on the CPU, for all ways to split its model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.data import Batch
from hpctrain.distributed import (
    ParallelPlan,
    Recomputation,
    TensorPlan,
    checkpoint_activations,
    repeated_blocks,
    tensor_styles,
)
from hpctrain.errors import UsageError
from hpctrain.run.build import build_model
from hpctrain.run.compute.device import MODEL_DTYPE, autocast_for
from hpctrain.run.memory.sizes import (
    Activations,
    LayerActivations,
    Measured,
    MeasuredPart,
    ModelSizes,
    TensorMessages,
    line_through,
)
from hpctrain.run.recipe.schema import Recipe
from hpctrain.train import Task, TaskRunner, derive_seed, seed_generators

# Measures what forward and backward of a micro-batch hold at once, on the CPU of this process.


# The largest growth of memory, with a margin, if the number of samples doubles.
_GROWTH = 2.5


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create within the `with` block, until the memory is freed.

    The memory that views share counts once.

    Args:
        known: Tensors whose memory is not counted.

    Attributes:
        now: The bytes that are alive.
        most: The largest number of bytes alive at any time.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.most = 0
        for tensor in known:
            self._count(tensor, counts=False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return made

    def _count(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        if tensor.layout is not torch.strided:  # its memory is that of its parts
            return
        storage = tensor.untyped_storage()
        number = id(storage)
        if number in self._live:
            return
        num_bytes = storage.nbytes() if counts else 0
        self._live[number] = weakref.ref(storage, functools.partial(self._freed, number, num_bytes))
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def _freed(self, number: int, num_bytes: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        del self._live[number]
        self.now -= num_bytes


def most_bytes(runner: TaskRunner, batch: Batch) -> int:
    """Returns the peak bytes of forward and backward of `batch`, without parameters, buffers and the batch itself.

    A gradient counts until it is complete, since training then moves the gradient into a bucket.
    """
    known = [*runner.model.parameters(), *runner.model.buffers(), *batch.fields.values()]
    live = LiveBytes(known)
    with gradients_dropped(runner.model), live:
        runner.loss(batch).backward()
    return live.most


@contextmanager
def gradients_dropped(model: torch.nn.Module) -> Iterator[None]:
    """Drops each parameter's gradient as soon as it is complete, within the `with` block."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def measure_activations(
    make_runner: Callable[[Recomputation], TaskRunner],
    batch: Batch,
    *,
    ways: Iterable[Recomputation],
    memory: int,
    sizes: Sequence[int] = (),
) -> dict[Recomputation, dict[int, int]]:
    """Returns, per kind of activation checkpointing, the peak bytes by number of samples, for two numbers of samples.

    There is only one number of samples if the batch has one sample. The first samples of `batch` are used. `sizes`
    gives the numbers of samples. If `sizes` is empty, the first kind is measured with 2, 4, 8, ... samples, as long as
    the batch is large enough and the next measurement is expected to take less than `memory` bytes. The two largest
    numbers of samples are then used for all kinds.

    make_runner: creates a runner with a new model.
    """
    measured: dict[Recomputation, dict[int, int]] = {}
    for way in ways:
        runner = make_runner(way)
        found: dict[int, int] = {}
        if sizes:
            measured[way] = {samples: most_bytes(runner, first_of(batch, samples)) for samples in sizes}
            continue
        samples = min(2, batch.num_samples)
        while samples <= batch.num_samples:
            found[samples] = most_bytes(runner, first_of(batch, samples))
            if _GROWTH * found[samples] > memory:
                break
            samples *= 2
        sizes = sorted(found)[-2:]
        measured[way] = {samples: found[samples] for samples in sizes}
    return measured


def first_of(batch: Batch, samples: int) -> Batch:
    """Returns the first samples of a batch."""
    fields = {name: tensor[:samples] for name, tensor in batch.fields.items()}
    return replace(batch, fields=fields, num_samples=samples, num_padded=0, indices=None)


# Measures, layer by layer, what a pipeline's stages hold between forward and backward, on this process's
# CPU.


# Creates the task's runner with another model.
RunnerOf = Callable[[nn.Module], TaskRunner]


@dataclass(slots=True, kw_only=True)
class _Bytes:
    """The bytes of one layer: kept for backward, the peak beyond these, and the output."""

    kept: int
    more: int
    output: int


def measure_layers(
    runner_of: RunnerOf, layers: Sequence[nn.Module], batch: Batch, *, sizes: Sequence[int]
) -> LayerActivations:
    """Returns the memory of the layers and the loss.

    sizes: how many of the first samples of `batch` to measure with.

    The task's loss must call its model once, with one tensor. This tensor is the input of the first layer; the output
    of each layer is the input of the next layer.
    """
    measured = {samples: _measured(runner_of, layers, first_of(batch, samples)) for samples in sizes}
    found = [dict(zip(measured, of_layer, strict=True)) for of_layer in zip(*measured.values(), strict=True)]
    many = max(sizes)
    return LayerActivations(
        kept=tuple(line_through({n: layer.kept for n, layer in of.items()}) for of in found),
        more=tuple(line_through({n: layer.more for n, layer in of.items()}) for of in found),
        output_bytes=tuple(of[many].output / many for of in found),
    )


def _measured(runner_of: RunnerOf, layers: Sequence[nn.Module], batch: Batch) -> list[_Bytes]:
    chain = _OneByOne(layers)
    runner_of(chain).loss(batch)
    if chain.output is None:
        raise UsageError(
            "the task's loss did not call its model: in a pipeline it must, since the call passes the batch to the "
            "first stage"
        )
    output = chain.output.requires_grad_(chain.output.is_floating_point())
    runner = runner_of(_Given(output))
    live = LiveBytes([output, *batch.fields.values()])
    with live:
        loss = runner.loss(batch)
        kept = live.now
        loss.backward()
    return [*chain.found, _Bytes(kept=kept, more=live.most - kept, output=0)]


class _Given(nn.Module):
    """A model that returns the same output for any input."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self._output


class _OneByOne(nn.Module):
    """Measures forward and backward of one layer after another.

    `output` is the last output, detached from its graph.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.found: list[_Bytes] = []
        self.output: torch.Tensor | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values.detach().requires_grad_(values.is_floating_point())
            live = LiveBytes([values, *layer.parameters(), *layer.buffers()])
            with gradients_dropped(layer), live:
                output = layer(values)
                kept = live.now
                if output.requires_grad:
                    output.backward(torch.ones_like(output))
            self.found.append(_Bytes(kept=kept, more=live.most - kept, output=output.nbytes))
            values = output
        self.output = values.detach()
        return self.output


# The parts of layers that one rank of a tensor group holds, so that its memory can be measured on one
# rank.


# Dimension of `weight` along which it is split.
_WEIGHT_DIMS = {
    (nn.Linear, "column"): 0,
    (nn.Linear, "column-gathered"): 0,
    (nn.Linear, "row"): 1,
    (nn.Embedding, "column-gathered"): 1,
    (nn.Embedding, "row"): 0,
}
# For a module's input and output: the number of sums over the group in forward and in backward. What is
# gathered or scattered counts half.
_Shares: TypeAlias = tuple[tuple[float, float], tuple[float, float]]
_SUMMED: dict[str, _Shares] = {
    "row": ((0, 0), (1, 0)),
    "column": ((0, 1), (0, 0)),
    "column-gathered": ((0, 1), (0.5, 0)),
}
_SUMMED_ON_PARTS: dict[str, _Shares] = {
    "row": ((0, 0), (0.5, 0.5)),
    "column": ((0.5, 0.5), (0, 0)),
    "column-gathered": ((0.5, 0.5), (0.5, 0)),
    "sequence": ((0, 0), (0, 0)),
    "sequence-gathered": ((0, 0), (0.5, 0)),
}


def split_dimensions(model: nn.Module, plan: TensorPlan) -> dict[str, int]:
    """Returns the dimension along which each split parameter is split, by name. `plan` has passed `check_plan`."""
    found = {}
    for name, how in tensor_styles(model, plan).items():
        module = model.get_submodule(name)
        found[f"{name}.weight"] = _weight_dim(module, how)
        if isinstance(module, nn.Linear) and module.bias is not None and how != "row":
            found[f"{name}.bias"] = 0
    return found


def leave_one_part(model: nn.Module, plan: TensorPlan, *, tensor: int, sequence: bool = False) -> None:
    """Reduces `model`, in place, to what the first of `tensor` ranks holds, so that one rank can compute alone.

    Shapes are those of the first rank. The values are wrong: a part stands for the sum over the ranks, and gathered
    tensors are repetitions of a part.

    sequence: whether layers between split layers hold a part of the sequence.
    """
    dims = split_dimensions(model, plan)
    for name, how in tensor_styles(model, plan).items():
        module: Any = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            dim = dims.get(f"{name}.{key}")
            if dim is not None:
                part = parameter.detach().chunk(tensor, dim)[0].clone()
                setattr(module, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
        embeds = isinstance(module, nn.Embedding)
        if sequence and how != "row" and not embeds:
            _change_input(module, partial(_repeated, times=tensor, dim=-2))
        if how == "column-gathered":
            _change_output(module, partial(_repeated, times=tensor, dim=-1))
        elif embeds:
            _change_input(module, partial(torch.remainder, other=module.weight.shape[0]))
        if sequence and (how == "row" or embeds):
            _change_output(module, partial(_first_part, parts=tensor, dim=-2))
    for name, how in _on_parts(model, plan).items() if sequence else ():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            _change_input(module, partial(_first_part, parts=tensor, dim=-1))
        if how == "sequence-gathered":
            _change_output(module, partial(_repeated, times=tensor, dim=-2))


def _on_parts(model: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """Returns the modules that compute a part of the sequence, by name: `sequence` or `sequence-gathered`."""
    found = {}
    for how in ("sequence", "sequence-gathered"):
        # By their patterns alone: those of layers that are split are found in the same way.
        named = {
            pattern: "column"
            for pattern, given in plan.items()
            if (given if isinstance(given, str) else given[0]) == how
        }
        found.update(dict.fromkeys(tensor_styles(model, named), how))
    return found


_Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def _change_input(module: nn.Module, change: _Change) -> None:
    module.register_forward_pre_hook(lambda _, args: (change(args[0]),))


def _change_output(module: nn.Module, change: _Change) -> None:
    module.register_forward_hook(lambda _, args, output: change(output))


def _repeated(part: torch.Tensor, *, times: int, dim: int) -> torch.Tensor:
    """Returns a tensor of the shape that results from gathering the parts of all ranks."""
    return torch.cat([part] * times, dim=dim)


def _first_part(whole: torch.Tensor, *, parts: int, dim: int) -> torch.Tensor:
    return whole.chunk(parts, dim)[0].clone()


def _weight_dim(module: nn.Module, how: str) -> int:
    return next(
        dim for (kind, style), dim in _WEIGHT_DIMS.items() if style == how and isinstance(module, kind)
    )


@contextmanager
def counted_messages(
    model: nn.Module, plan: TensorPlan, *, samples: int, sequence: bool = False
) -> Iterator[Callable[[], TensorMessages]]:
    """Counts the bytes that the ranks of a tensor group would sum for the forward in the block, of `samples` samples.

    Yields a function that returns the bytes per sample after the block. The output of a `row` module is summed in
    forward, the gradient of the input of a `column` module in backward. With `sequence`, both tensors are scattered or
    gathered in forward and in backward instead; each scatter or gather counts as half a sum.
    """
    blocks = repeated_blocks(model)
    sums = {"forward": 0.0, "in_blocks": 0.0, "backward": 0.0}

    def counting(name: str, how: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        in_block = any(name.startswith(f"{block}.") for block in blocks)

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            takes = args[0].nbytes if args[0].is_floating_point() else 0
            of_input, of_output = _SUMMED_ON_PARTS[how] if sequence else _SUMMED[how]
            forward, backward = (
                (a * takes + b * output.nbytes) / samples for a, b in zip(of_input, of_output, strict=True)
            )
            sums["forward"] += forward
            sums["in_blocks"] += forward if in_block else 0.0
            sums["backward"] += backward

        return hook

    styles = {**tensor_styles(model, plan), **(_on_parts(model, plan) if sequence else {})}
    hooks = [
        model.get_submodule(name).register_forward_hook(counting(name, how)) for name, how in styles.items()
    ]
    try:
        yield lambda: TensorMessages(**sums)
    finally:
        for hook in hooks:
            hook.remove()


# Measures forward and backward of a recipe's task for all ways to split its model, on the CPU of this
# process.


_CPU = torch.device("cpu")
# Model and gradients, while activations are measured.
_COPIES = 2


def measure_forward_backward(
    recipe: Recipe,
    make_task: Callable[[], Task],
    batch: Batch,
    *,
    sizes: ModelSizes,
    savings: Sequence[Recomputation],
    plans: Sequence[ParallelPlan],
    besides: int,
    note: Callable[[str], None],
) -> Measured:
    """Returns the memory of forward and backward for the first samples of `batch`.

    A measurement that fails is left out, with a note.

    Args:
        savings: The kinds of activation checkpointing that the model supports.
        plans: The ways to split the model. Of the ways with split layers, only the way with the smallest tensor group
            is measured; likewise of the ways that also split sequences.
        besides: Bytes per sample that are not measured here but occupy memory of the run's device.
    """
    free = psutil.virtual_memory().available
    model_bytes = _COPIES * sizes.num_bytes + sizes.buffer_bytes
    if model_bytes > free:
        note(
            f"activations were not measured and count as 0: model and gradients take {model_bytes / 1e9:.3g} GB, "
            f"but this machine has only {free / 1e9:.3g} GB free"
        )
        return Measured()
    makers = _Makers(recipe, make_task)

    def lines(measured: Mapping[Recomputation, Mapping[int, int]]) -> dict[Recomputation, Activations]:
        return {saving: line_through(found, besides=besides) for saving, found in measured.items()}

    try:
        whole = measure_activations(makers.runner, batch, ways=savings, memory=free - model_bytes)
    except Exception as error:  # the user's model may raise anything
        note(
            "activations were not measured and count as 0, since the model does not train on this machine's CPU: "
            f"{type(error).__name__}: {error}"
        )
        return Measured()
    found = Measured(whole=lines(whole))
    samples = sorted(whole["none"])
    if any(plan.pipeline > 1 for plan in plans):
        try:
            found = replace(
                found, layers=_layers(makers.runner, makers, batch, savings=savings, sizes=samples)
            )
        except Exception as error:  # the layers may not be callable one after another
            note(
                f"activations of pipelines were not measured and count as 0: {type(error).__name__}: {error}"
            )
    for sequence in (False, True):
        split = [plan for plan in plans if plan.tensor > 1 and plan.sequence == sequence]
        if not split:
            continue
        try:
            fewest = min(split, key=lambda plan: plan.tensor)
            make = partial(makers.runner, split_as=fewest)
            part = MeasuredPart(
                ranks=fewest.tensor,
                whole=lines(measure_activations(make, batch, ways=savings, memory=0, sizes=samples)),
                layers=_layers(make, makers, batch, savings=savings, sizes=samples)
                if found.layers and any(plan.pipeline > 1 for plan in split)
                else {},
                messages=_messages(makers.runner("none"), fewest, first_of(batch, samples[-1])),
            )
            found = replace(found, sequence=part) if sequence else replace(found, split=part)
        except Exception as error:  # the model may not work with parts of its layers
            what = "split layers and sequences" if sequence else "split layers"
            note(f"activations of {what} were not measured and count as 0: {type(error).__name__}: {error}")
    return found


def _layers(
    make_runner: Callable[[Recomputation], TaskRunner],
    makers: _Makers,
    batch: Batch,
    *,
    savings: Sequence[Recomputation],
    sizes: Sequence[int],
) -> dict[Recomputation, LayerActivations]:
    """Returns the memory of the layers that the task names for pipelines."""
    found = {}
    for saving in savings:
        runner = make_runner(saving)
        of_task = runner.task.pipeline_layers(runner.model)  # type: ignore[attr-defined]
        runner_of = partial(makers.runner_of, runner.task)
        found[saving] = measure_layers(runner_of, list(of_task), batch, sizes=sizes)
    return found


def _messages(runner: TaskRunner, plan: ParallelPlan, batch: Batch) -> TensorMessages:
    """Returns the bytes per sample that the ranks of a tensor group sum in forward and backward.

    runner: a runner with the whole model.
    plan: the way to split the layers.
    """
    counting = counted_messages(
        runner.model, plan.tensor_plan, samples=batch.num_samples, sequence=plan.sequence
    )
    with counting as sums, torch.no_grad():
        runner.loss(batch)
    return sums()


class _Makers:
    """Creates runners of the recipe's task on the CPU."""

    def __init__(self, recipe: Recipe, make_task: Callable[[], Task]) -> None:
        self._recipe = recipe
        self._make_task = make_task

    def runner(self, saving: Recomputation, *, split_as: ParallelPlan | None = None) -> TaskRunner:
        """Returns a runner with a new model, or with the part of a new model that one rank of a tensor group holds.

        saving: the kind of activation checkpointing.
        split_as: the way to split the layers; None: the model is whole.
        """
        seed_generators(derive_seed(self._recipe.run.seed, "model"))
        task = self._make_task()
        model = build_model(self._recipe, task, device=_CPU)
        if split_as is not None:
            leave_one_part(model, split_as.tensor_plan, tensor=split_as.tensor, sequence=split_as.sequence)
        if saving != "none":
            checkpoint_activations(model, saving)
        return self.runner_of(task, model)

    def runner_of(self, task: Task, model: torch.nn.Module) -> TaskRunner:
        precision = self._recipe.run.precision
        return TaskRunner(
            task, model, device=_CPU, dtype=MODEL_DTYPE[precision],
            autocast=autocast_for(precision, device=_CPU),
        )  # fmt: skip
