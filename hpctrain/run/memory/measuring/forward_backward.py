"""Measures forward and backward of a recipe's task for all ways to split its model, on the CPU of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import psutil
import torch

from hpctrain.data import Batch
from hpctrain.distributed import Checkpointing, ParallelPlan, checkpoint_activations
from hpctrain.run.build import build_model
from hpctrain.run.compute.precision import MODEL_DTYPE, autocast_for
from hpctrain.run.memory.measuring.activations import first_of, measure_activations
from hpctrain.run.memory.measuring.layer_parts import counted_messages, leave_one_part
from hpctrain.run.memory.measuring.layers import measure_layers
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

_CPU = torch.device("cpu")
# Model and gradients, while activations are measured.
_COPIES = 2


def measure_forward_backward(
    recipe: Recipe,
    make_task: Callable[[], Task],
    batch: Batch,
    *,
    sizes: ModelSizes,
    savings: Sequence[Checkpointing],
    plans: Sequence[ParallelPlan],
    besides: int,
    note: Callable[[str], None],
) -> Measured:
    """Returns what forward and backward of the first samples of `batch` hold.

    savings: kinds of activation checkpointing that the model allows. plans: which are to be measured: of those with
    split layers, and of those with sequences too, the one with the fewest ranks. besides: bytes of a sample that do not
    count here, but on the run's device. What fails is left out, with a note.
    """
    free = psutil.virtual_memory().available
    model_bytes = _COPIES * sizes.num_bytes + sizes.buffer_bytes
    if model_bytes > free:
        note(
            f"activations were not measured and count as nothing: model and gradients take {model_bytes / 1e9:.3g} GB, "
            f"of which this machine has {free / 1e9:.3g} GB free"
        )
        return Measured()
    makers = _Makers(recipe, make_task)

    def lines(measured: Mapping[Checkpointing, Mapping[int, int]]) -> dict[Checkpointing, Activations]:
        return {saving: line_through(found, besides=besides) for saving, found in measured.items()}

    try:
        whole = measure_activations(makers.runner, batch, ways=savings, memory=free - model_bytes)
    except Exception as error:  # the user's model may raise anything
        note(
            "activations were not measured and count as nothing, since the model does not train on this machine's CPU: "
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
                f"activations of pipelines were not measured and count as nothing: {type(error).__name__}: {error}"
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
            note(
                f"activations of {what} were not measured and count as nothing: {type(error).__name__}: {error}"
            )
    return found


def _layers(
    make_runner: Callable[[Checkpointing], TaskRunner],
    makers: _Makers,
    batch: Batch,
    *,
    savings: Sequence[Checkpointing],
    sizes: Sequence[int],
) -> dict[Checkpointing, LayerActivations]:
    """Returns what the layers hold that the task names for pipelines."""
    found = {}
    for saving in savings:
        runner = make_runner(saving)
        of_task = runner.task.pipeline_layers(runner.model)  # type: ignore[attr-defined]
        runner_of = partial(makers.runner_of, runner.task)
        found[saving] = measure_layers(runner_of, list(of_task), batch, sizes=sizes)
    return found


def _messages(runner: TaskRunner, plan: ParallelPlan, batch: Batch) -> TensorMessages:
    """Returns what the ranks of a tensor group send each other. runner: of the whole model."""
    counting = counted_messages(
        runner.model, plan.tensor_plan, samples=batch.num_samples, sequence=plan.sequence
    )
    with counting as sums, torch.no_grad():
        runner.loss(batch)
    return sums()


class _Makers:
    """Makes runners of the recipe's task on the CPU."""

    def __init__(self, recipe: Recipe, make_task: Callable[[], Task]) -> None:
        self._recipe = recipe
        self._make_task = make_task

    def runner(self, saving: Checkpointing, *, split_as: ParallelPlan | None = None) -> TaskRunner:
        """Returns one with a new model, or with what one of the ranks has of it that hold its layers."""
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
