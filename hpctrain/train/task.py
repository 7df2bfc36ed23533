"""What a run trains: a class of the user's that the recipe names."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from hpctrain.errors import RecipeError

Fields = Mapping[str, torch.Tensor]


@runtime_checkable
class Task(Protocol):
    """A model and what it is good for. Its methods do not communicate and know nothing of ranks.

    `fields` maps the dataset's field names to tensors of shape (num_samples, *sample shape), on the run's
    device; num_samples is this rank's share and at least 1. Floating-point fields come in the model's dtype
    (`run.precision`), integer and bool fields in the stored one.
    """

    def build_model(self) -> torch.nn.Module:
        """A new model on the CPU. Called once; the random generators are seeded alike on every rank."""

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        """Mean loss over the samples, shape (). The run weighs it by the number of samples.

        With a further parameter `valid`, bool of shape (num_samples,), it is given the whole of a batch that
        was filled up (data.last_batch = "pad"): the mean is then over the samples that are valid. Without it,
        it is given those only.
        """

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        """Means over the samples, for evaluation; same names in each call. Called without gradients."""


def takes_valid(task: Task) -> bool:
    """Whether the task's loss wants filled batches whole, and a mask of what counts in them."""
    try:
        return "valid" in inspect.signature(task.loss).parameters
    except (TypeError, ValueError):  # callables written in C tell nothing
        return False


def import_task(target: str, *, options: Mapping[str, Any], search: Sequence[Path] = ()) -> Task:
    """Import `module:Class` and call it with `options`.

    search: folders looked through beside the installed packages (the recipe's, the working directory).
    Raises RecipeError that says what was missing.
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
        searched = ", ".join(str(folder) for folder in search)
        raise RecipeError(
            f"task {target} cannot be imported: {error}. Looked in {searched} and the installed packages; "
            "set task.target to module:Class of a module that is there on every node"
        ) from error
    except AttributeError as error:
        raise RecipeError(f"task {target} cannot be imported: {error}") from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise RecipeError(
            f"task {target}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    return _build(found, target=target, options=options)


def _build(found: Any, *, target: str, options: Mapping[str, Any]) -> Task:
    if not callable(found):
        raise RecipeError(
            f"task {target} is {type(found).__name__}, not a class or a function that makes a task"
        )
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise RecipeError(
            f"task.options do not fit {target}{inspect.signature(found)}: {error}; asked for {dict(options)}"
        ) from error
    task = found(**options)
    absent = [name for name in ("build_model", "loss", "metrics") if not callable(getattr(task, name, None))]
    if absent:
        raise RecipeError(f"task {target} has no method {', '.join(absent)}: see hpctrain.train.Task")
    return task
