"""Measures forward and backward of a recipe's task for all ways to split its model, on the CPU of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import psutil
import torch

from hpctrain.data import Batch
from hpctrain.distributed import Checkpointing, TensorPlan, checkpoint_activations
from hpctrain.run.build import build_model
from hpctrain.run.compute.precision import MODEL_DTYPE, autocast_for
from hpctrain.run.memory.measuring.activations import first_of, measure_activations
from hpctrain.run.memory.measuring.layer_parts import counted_messages, leave_one_part
from hpctrain.run.memory.measuring.layers import measure_layers
from hpctrain.run.memory.sizes import Activations, Measured, ModelSizes, line_through
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
    tensor_plan: TensorPlan,
    split_ranks: int,
    in_stages: bool,
    besides: int,
    note: Callable[[str], None],
) -> Measured:
    """Returns what forward and backward of the first samples of `batch` hold.

    savings: kinds of activation checkpointing that the model allows. split_ranks: how many ranks hold a layer, by
    `tensor_plan`; 1: none. in_stages: whether the task says what its layers are. besides: bytes of a sample that do not
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
    if split_ranks > 1:
        try:
            make = partial(makers.runner, tensor_plan=tensor_plan, tensor=split_ranks)
            split = lines(measure_activations(make, batch, ways=savings, memory=0, sizes=samples))
            runner = makers.runner("none")
            with counted_messages(runner.model, tensor_plan, samples=samples[-1]) as sums, torch.no_grad():
                runner.loss(first_of(batch, samples[-1]))
            found = replace(found, split=split, split_ranks=split_ranks, messages=sums())
        except Exception as error:  # the model may not work with parts of its layers
            note(
                "activations of split layers were not measured and count as nothing: "
                f"{type(error).__name__}: {error}"
            )
    if in_stages:
        try:
            layers = {}
            for saving in savings:
                runner = makers.runner(saving)
                of_task = runner.task.pipeline_layers(runner.model)  # type: ignore[attr-defined]
                runner_of = partial(makers.runner_of, runner.task)
                layers[saving] = measure_layers(runner_of, list(of_task), batch, sizes=samples)
            found = replace(found, layers=layers)
        except Exception as error:  # the layers may not be callable one after another
            note(
                f"activations of pipelines were not measured and count as nothing: {type(error).__name__}: {error}"
            )
    return found


class _Makers:
    """Makes runners of the recipe's task on the CPU."""

    def __init__(self, recipe: Recipe, make_task: Callable[[], Task]) -> None:
        self._recipe = recipe
        self._make_task = make_task

    def runner(
        self, saving: Checkpointing, *, tensor_plan: TensorPlan | None = None, tensor: int = 1
    ) -> TaskRunner:
        """Returns one with a new model, or with what one of `tensor` ranks has of it."""
        seed_generators(derive_seed(self._recipe.run.seed, "model"))
        task = self._make_task()
        model = build_model(self._recipe, task, device=_CPU)
        if tensor_plan is not None:
            leave_one_part(model, tensor_plan, tensor=tensor)
        if saving != "none":
            checkpoint_activations(model, saving)
        return self.runner_of(task, model)

    def runner_of(self, task: Task, model: torch.nn.Module) -> TaskRunner:
        precision = self._recipe.run.precision
        return TaskRunner(
            task, model, device=_CPU, dtype=MODEL_DTYPE[precision],
            autocast=autocast_for(precision, device=_CPU),
        )  # fmt: skip
