"""Postpones the import of torch's compiler, which otherwise takes 0.8 s of every start.

The first optimizer of a process imports `torch._dynamo` for two functions that do nothing outside compiled code. A
stand-in module provides these two functions until another attribute of the module is used, as by `torch.compile`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch

NAME = "torch._dynamo"
F = TypeVar("F", bound=Callable[..., Any])


class _PostponedDynamo(ModuleType):
    """The stand-in for `torch._dynamo`. Use of an attribute other than the two below imports the real module."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__file__ = None  # `inspect` asks every module for it
        self._disabled: list[Callable[..., Any]] = []

    @staticmethod
    def graph_break(*args: object, **options: object) -> None:
        """Does nothing, since nothing is being compiled."""

    def disable(self, fn: F, *args: object, **options: object) -> F:
        """Returns `fn` unchanged. torch stores the result in `fn.__dynamo_disable`."""
        self._disabled.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def _load(self) -> ModuleType:
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            for fn in self._disabled:  # the next call of each asks the module itself
                fn.__dict__.pop("__dynamo_disable", None)
            module = importlib.import_module(NAME)
            torch._dynamo = module
            if torch.are_deterministic_algorithms_enabled():
                set_deterministic()
        return sys.modules[NAME]


def postpone_dynamo() -> None:
    """Postpones the import of `torch._dynamo` to the first real use, unless the module is imported already."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = _PostponedDynamo()


def set_deterministic() -> None:
    """Turns on torch's deterministic algorithms. Operations without a deterministic algorithm only warn.

    Applies to compiled code too once the compiler is imported.
    """
    if isinstance(sys.modules.get(NAME), _PostponedDynamo):
        torch._C._set_deterministic_algorithms(True, warn_only=True)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise every new buffer would first be filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
