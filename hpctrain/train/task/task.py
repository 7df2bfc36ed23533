"""The interface of the user's task class, which the recipe names, and importing it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from hpctrain.errors import RecipeError

# Imports what a recipe names as `module:attribute`: a task, an optimizer, a schedule.


def import_named(target: str, *, key: str, search: Sequence[Path] = ()) -> Any:
    """Returns the object that `target`, "module:attribute", names.

    key: the recipe's key, for errors. search: folders that are searched along with the installed packages (the
    recipe's folder, the working directory). Raises RecipeError, which says what was missing.
    """
    module_name, _, attribute = target.partition(":")
    for folder in reversed(search):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except ImportError as error:
        searched = f"{', '.join(map(str, search))} and " if search else ""
        raise RecipeError(
            f"{key} = {target} cannot be imported: {error}. Looked in {searched}the installed packages; "
            "name a module that is there on every node"
        ) from error
    except AttributeError as error:
        raise RecipeError(f"{key} = {target} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything, or call sys.exit
        raise RecipeError(
            f"{key} = {target}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    return found


def check_call(
    function: Callable[..., Any], *args: Any, target: str, options_key: str, options: Mapping[str, Any]
) -> None:
    """Raises RecipeError unless `function(*args, **options)` fits the function's signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # callables written in C may have none
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        raise RecipeError(
            f"{options_key} do not fit {target}{signature}: {error}; found {dict(options)}"
        ) from error


Fields = Mapping[str, torch.Tensor]
Weight = float | torch.Tensor


@runtime_checkable
class Task(Protocol):
    """A model, its loss and its metrics. The methods do not communicate and do not depend on the rank.

    `fields` maps the dataset's field names to tensors of shape (num_samples, *sample shape), on the run's
    device; num_samples is this rank's share and at least 1. Floating-point fields have the model's dtype
    (`run.precision`), integer and bool fields their stored dtype. A task whose layers can be split over ranks has a
    further method, see `TensorParallelTask`.

    A task may have a method `parallel_blocks()`: it returns the names of the modules that are sharded, and computed
    again in backward, one by one, such as ["encoder.layers.*", "decoder.layers.*"], where `*` stands for any text
    without a dot. Without it these are the repeated blocks that are found in the model.

    A task may have a method `weight(fields)`, or `weight(fields, valid)`: the weight of `loss` and of `metrics` for
    these samples, in place of the pairs that they return otherwise. It is called on every rank that has samples.

    For `parallel.pipeline` a task has one more method: `pipeline_layers(model)` returns the modules that the model
    calls one after another, each with what the one before returned, a tensor with the samples along dimension 0. `loss`
    and `metrics` then call the model once, with one tensor.
    """

    def build_model(self) -> torch.nn.Module:
        """Returns a new model on the CPU. Called once; the random generators have the same seed on every rank."""

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor | tuple[torch.Tensor, Weight]:
        """Returns the mean loss over the samples, shape (). The run weights it by the number of samples.

        A loss that is a mean over something else, such as tokens that are not padding, comes with its weight, in each
        call: a pair (loss, weight). The loss of a step is then sum(weight x loss) / sum(weight) over all micro-batches
        and ranks. The weight, a finite number of 0 or more or a tensor of shape (), gets no gradient; a loss of weight
        0 is not used and may be NaN.

        If the method has a parameter `valid`, bool of shape (num_samples,), a padded batch (data.last_batch = "pad")
        is passed completely, and the mean must be over the valid samples. Without this parameter only the valid
        samples are passed.
        """

    def metrics(
        self, model: torch.nn.Module, fields: Fields
    ) -> dict[str, float] | tuple[dict[str, float], Weight]:
        """Returns means over the samples by name, for evaluation; the same names in each call. Called under no_grad.

        Means over something else come with their weight, in each call: a pair (metrics, weight).
        """


@runtime_checkable
class TensorParallelTask(Task, Protocol):
    """A task whose layers several ranks can hold in parts (`parallel.tensor`)."""

    def tensor_plan(self) -> Mapping[str, str | tuple[str, int]]:
        """Returns how modules of the model are split, by name; in names `*` stands for any text without a dot.

        `column`: each rank computes some of a Linear's outputs, and a `row` module takes them. `row`: each rank takes
        some of the inputs, and the outputs are summed; of an Embedding, some of the vocabulary. `column-gathered`: as
        `column`, but every rank receives all outputs; also of an Embedding. A pair, such as ("column", heads), says
        that the features consist of equal parts that stay whole. What the plan does not name is computed alike by the
        ranks that share a layer. Example:

            {"blocks.*.attention_in": ("column", 8), "blocks.*.attention_out": ("row", 8)}

        For `parallel.sequence` the plan names every other layer too: `sequence`, each rank computes its part of the
        sequence; `sequence-gathered`, every rank then receives the whole, as from the last layer. A pair gives the
        length of the sequence. Without `parallel.sequence` these are computed alike by all ranks.
        """


def takes_valid(task: Task) -> bool:
    """True if the task's `loss` has the parameter `valid` for padded batches."""
    return has_valid(task.loss)


def has_valid(method: Callable[..., Any]) -> bool:
    """True if a method of a task has the parameter `valid`."""
    try:
        return "valid" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # callables written in C have no signature
        return False


def import_task(target: str, *, options: Mapping[str, Any], search: Sequence[Path] = ()) -> Task:
    """Imports `module:Class` and returns what it makes of `options`.

    search: folders that are searched along with the installed packages (the recipe's, the working directory).
    Raises RecipeError, which says what was missing.
    """
    found = import_named(target, key="task.target", search=search)
    if not callable(found):
        raise RecipeError(
            f"task.target = {target} is {type(found).__name__}, not a class or a function that makes a task"
        )
    check_call(found, target=target, options_key="task.options", options=options)
    task = found(**options)
    absent = [name for name in ("build_model", "loss", "metrics") if not callable(getattr(task, name, None))]
    if absent:
        raise RecipeError(
            f"task.target = {target} has no method {', '.join(absent)}: see hpctrain.train.Task"
        )
    return task
