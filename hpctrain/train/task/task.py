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
        key: The key of the recipe that holds it, for errors.
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

    - `parallel_blocks()` returns names of modules, such as ["encoder.layers.*", "decoder.layers.*"], where `*` stands
      for any text without a dot. They are sharded, and recomputed in backward, one at a time. Without the method these
      are the repeated blocks that are found in the model.
    - `weight(fields)` or `weight(fields, valid)` returns the weight of `loss` and `metrics` for these samples, instead
      of the pairs that the two would return. It is called on every rank that has samples.
    - `pipeline_layers(model)`, for `parallel.pipeline`, returns the modules that the model calls one after another.
      Each takes the result of the module before it, a tensor with the samples along dimension 0. `loss` and `metrics`
      then call the model once, with one tensor.
    - `tensor_plan()`, for `parallel.tensor`; see `TensorParallelTask`.
    """

    def build_model(self) -> torch.nn.Module:
        """Returns a new model on the CPU.

        Called once per run, with the same seed of the random generators on every rank.
        """

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor | tuple[torch.Tensor, Weight]:
        """Returns the mean loss over the samples. The run weights it by the number of samples.

        A loss that is a mean over something else, such as tokens that are not padding, is returned with its weight in
        every call. The loss of a step is then sum(weight x loss) / sum(weight) over all micro-batches and ranks. The
        weight gets no gradient; a loss of weight 0 is ignored and may be NaN.

        If the method has a parameter `valid`, bool of shape (num_samples,), a padded batch (data.last_batch = "pad") is
        passed completely, and the mean must be over the valid samples. Without this parameter only the valid samples
        are passed.

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
            Values by name, with the same names in every call. Means over something else than samples are returned in
                every call as a pair (metrics, weight).
        """


@runtime_checkable
class TensorParallelTask(Task, Protocol):
    """A task whose layers can be split over several ranks (`parallel.tensor`)."""

    def tensor_plan(self) -> Mapping[str, str | tuple[str, int]]:
        """Returns how the modules of the model are split over the ranks of a tensor group.

        A module that the plan does not name is computed alike by all ranks of the group. In names, `*` stands for any
        text without a dot. The values are:

        - `column`: each rank computes some outputs of an nn.Linear, which a `row` module then takes as inputs.
        - `row`: each rank takes some inputs of an nn.Linear, and the outputs are summed. Of an nn.Embedding, each rank
          holds some entries of the vocabulary.
        - `column-gathered`: like `column`, but every rank receives all outputs. Also for an nn.Embedding.
        - A pair such as ("column", heads): the features consist of so many equal parts, none of which is cut.

        Example:

            {"blocks.*.attention_in": ("column", 8), "blocks.*.attention_out": ("row", 8)}

        For `parallel.sequence` the plan names every other layer too. `sequence`: each rank computes its part of the
        sequence. `sequence-gathered`: every rank then receives the whole sequence, as from the last layer. A pair gives
        the length of the sequence. Without `parallel.sequence` all ranks compute these layers alike.
        """


def takes_valid(task: Task) -> bool:
    """Returns True if the task's `loss` has the parameter `valid` for padded batches."""
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
