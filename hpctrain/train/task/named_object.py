"""Imports what a recipe names as `module:attribute`: a task, an optimizer, a schedule."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import RecipeError


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
