"""The interface of a task class that a recipe names, and the functions that import it."""

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
    """Imports `module:attribute` and returns the attribute.

    Args:
        target: The text "module:attribute".
        key: The key of the recipe that contains `target`, for error messages.
        search: Folders to search in addition to the installed packages, such as the folder of the recipe.

    Raises:
        RecipeError: If the module or the attribute is missing, or the import raises.
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
    """Raises RecipeError unless the signature of `function` accepts `*args` and `**options`."""
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


# The interface of the user's task class, which the recipe names, and importing it.


Fields = Mapping[str, torch.Tensor]
Weight = float | torch.Tensor


@runtime_checkable
class Task(Protocol):
    """A model, its loss and its metrics. A recipe names the class; the run calls the methods.

    The methods do not communicate and do not depend on the rank. `fields` maps the dataset's field names to tensors of
    shape (num_samples, *sample shape) on the run's device, where num_samples is the number of samples of this rank, at
    least 1. Floating-point fields have the model's dtype (`run.precision`); integer and bool fields keep the dtype of
    the dataset.

    Optional methods:

    - `parallel_blocks()` returns the names of the model's blocks, modules that are sharded, and recomputed in backward,
      one at a time. An example is ["encoder.layers.*", "decoder.layers.*"], where `*` stands for any text without a
      dot. Without this method, the blocks are the repeated modules that are found in the model.
    - `weight(fields)` or `weight(fields, valid)` returns the weight of `loss` and `metrics` for these samples. `loss`
      and `metrics` then do not return pairs. The method is called on every rank that has samples.
    - `pipeline_layers(model)`, for `parallel.pipeline`, returns the modules that the model calls one after another.
      Each module takes the result of the module before it, a tensor with the samples along dimension 0. `loss` and
      `metrics` must then call the model once, with one tensor.
    - `tensor_plan()`, for `parallel.tensor`; see `TensorParallelTask`.
    """

    def build_model(self) -> torch.nn.Module:
        """Returns a new model on the CPU.

        Called once per run, with the same seed of the random generators on every rank.
        """

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor | tuple[torch.Tensor, Weight]:
        """Returns the mean loss over the samples. The run weights the loss by the number of samples.

        If the loss is a mean over something else, such as tokens that are not padding, the method must return the loss
        with its weight in every call. The loss of a step is then sum(weight x loss) / sum(weight) over all
        micro-batches and ranks. The weight gets no gradient; a loss of weight 0 is ignored and may be NaN.

        The method may have a parameter `valid`, bool of shape (num_samples,). The method then gets all samples of a
        padded batch (data.last_batch = "pad"), and the mean must be over the valid samples. Without this parameter the
        method gets only the valid samples.

        Args:
            model: The model.
            fields: The samples of this rank.

        Returns:
            The loss, shape (), or a pair (loss, weight), where the weight is a finite number of at least 0 or a tensor
                of shape ().
        """

    def metrics(
        self, model: torch.nn.Module, fields: Fields
    ) -> dict[str, float] | tuple[dict[str, float], Weight]:
        """Returns the metrics of an evaluation, as means over the samples. Called under `torch.no_grad()`.

        Args:
            model: The model.
            fields: The samples of this rank.

        Returns:
            Values by name, with the same names in every call. If the metrics are means over something else than
                samples, a pair (metrics, weight), in every call.
        """


@runtime_checkable
class TensorParallelTask(Task, Protocol):
    """A task whose layers can be split over several ranks (`parallel.tensor`)."""

    def tensor_plan(self) -> Mapping[str, str | tuple[str, int]]:
        """Returns how the modules of the model are split over the ranks of a tensor group.

        If the plan does not name a module, every rank of the group computes the whole module. The keys are names of
        modules, where `*` stands for any text without a dot. The values are:

        - `column`: each rank computes a part of the outputs of an nn.Linear. A `row` module must take these outputs as
          inputs.
        - `row`: each rank takes a part of the inputs of an nn.Linear, and the outputs are summed over the ranks. Of an
          nn.Embedding, each rank holds a part of the vocabulary.
        - `column-gathered`: like `column`, but every rank receives all outputs. Also for an nn.Embedding.
        - A pair such as ("column", heads): the features consist of `heads` equal parts, and each part stays whole on
          one rank.

        Example:

            {"blocks.*.attention_in": ("column", 8), "blocks.*.attention_out": ("row", 8)}

        For `parallel.sequence` the plan must name every other layer too, with one of two values. `sequence`: each rank
        computes the layer on its part of the sequence. `sequence-gathered`: the same, and every rank then receives the
        whole sequence; for the last layer, for example. A pair of such a value and a number states the length of the
        sequence. Without `parallel.sequence`, every rank computes such layers as a whole.
        """


def takes_valid(task: Task) -> bool:
    """Returns True if the task's `loss` has the parameter `valid`, which marks the valid samples of padded batches."""
    return has_valid(task.loss)


def has_valid(method: Callable[..., Any]) -> bool:
    """Returns True if a method of a task has the parameter `valid`."""
    try:
        return "valid" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # callables written in C have no signature
        return False


def import_task(target: str, *, options: Mapping[str, Any], search: Sequence[Path] = ()) -> Task:
    """Imports `module:Class` and creates the task with `options`.

    Args:
        target: The text "module:Class", or "module:function" with a function that returns a task.
        options: The keyword arguments of the class.
        search: Folders to search in addition to the installed packages, such as the folder of the recipe.

    Raises:
        RecipeError: If the class is missing, does not accept the options, or lacks a method of `Task`.
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
