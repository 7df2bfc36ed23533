"""Samples from a user's function, `module:function`, that returns an iterator over dicts."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from hpctrain.errors import DataError, HpctrainError, UsageError

TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class IteratorSource:
    """open_part(part): returns the iterator over one of `num_parts` parts."""

    open_part: Callable[[int], Iterator[Mapping[str, Any]]]
    num_parts: int
    attributes: dict[str, JsonValue] = field(default_factory=dict)


def iterator_source(target: str, *, num_parts: int | None) -> IteratorSource:
    """Imports `module:function` from the working directory or the installed packages.

    The function takes no arguments, or `part` and `num_parts`: then the parts are packed separately, also by
    different ranks. num_parts: None means 1. Raises UsageError if the function cannot be imported, or takes other
    arguments. `open_part` raises DataError if the function raises an error.
    """
    module_name, _, attribute = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            function = getattr(function, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the source {target} cannot be imported: {error} (also searched in {Path.cwd()})"
        ) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything, or call sys.exit
        raise UsageError(f"the source {target}: importing raised {type(error).__name__}: {error}") from error
    takes_parts = _takes_parts(function, target=target)
    if not takes_parts and (num_parts or 1) > 1:
        raise UsageError(
            f"{num_parts} parts, but {target} takes no arguments part and num_parts: use --parts 1, which one "
            "process packs, or add these arguments"
        )
    parts = num_parts or 1

    def open_part(part: int) -> Iterator[Mapping[str, Any]]:
        try:
            return iter(function(part=part, num_parts=parts) if takes_parts else function())
        except HpctrainError:
            raise
        except Exception as error:
            raise DataError(f"{target} raised {type(error).__name__}: {error}") from error

    return IteratorSource(open_part=open_part, num_parts=parts, attributes={"source": target})


def _takes_parts(function: Any, *, target: str) -> bool:
    if not callable(function):
        raise UsageError(f"the source {target} is {type(function).__name__}, not a function")
    signature = inspect.signature(function)
    for arguments, takes_parts in (({"part": 0, "num_parts": 1}, True), ({}, False)):
        try:
            signature.bind(**arguments)
        except TypeError:
            continue
        return takes_parts
    raise UsageError(f"{target}{signature} must take no arguments, or part and num_parts")
