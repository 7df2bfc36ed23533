"""Postpones the import of torch's compiler, which the first optimizer of a process would load: 0.8 s of every start.

`torch.optim` imports `torch._dynamo` for two functions that do nothing outside of compiled code. Until something else
of that module is used, as `torch.compile` does, a stand-in has these two.
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
    """Stands in for `torch._dynamo`; any other attribute than these two loads the module itself."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__file__ = None  # `inspect` asks every module for it
        self._disabled: list[Callable[..., Any]] = []

    @staticmethod
    def graph_break(*args: object, **options: object) -> None:
        """Nothing is being compiled."""

    def disable(self, fn: F, *args: object, **options: object) -> F:
        """Returns `fn`. torch keeps the result in `fn.__dynamo_disable`."""
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
    """Puts the stand-in in place, unless the module is loaded already."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = _PostponedDynamo()


def set_deterministic() -> None:
    """Asks torch for deterministic algorithms, with a warning where there is none; in compiled code too once loaded."""
    if isinstance(sys.modules.get(NAME), _PostponedDynamo):
        torch._C._set_deterministic_algorithms(True, warn_only=True)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
    # Else every new buffer would first be filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
