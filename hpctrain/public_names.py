"""Lazy import of the names of the public packages. Names of the previous version still work, with a warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import lazy_loader

_ALL = re.compile(r"^__all__ = \[(.*?)\]", flags=re.DOTALL | re.MULTILINE)


def attach(
    package: str, file: str, *, old_names: Mapping[str, str | tuple[str, str]] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a public package.

    The package's stub `__init__.pyi` lists its names. If the stub has an `__all__`, only the names in `__all__` are
    public; the stub's other names are for use within hpctrain.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`. The stub is in the same folder.
        old_names: For each name of the previous version, the dotted name to use now. For a name that became private,
            a pair: the dotted name of the private object, and what to use instead. Old names can still be imported,
            with a DeprecationWarning, but are in neither `dir()` nor the stub.
    """
    load, _, names = lazy_loader.attach_stub(package, file)
    listed = _ALL.search(Path(file).with_suffix(".pyi").read_text())
    public = re.findall(r'"(\w+)"', listed[1]) if listed is not None else names
    old = old_names or {}

    def get(name: str) -> object:
        if name not in old:
            return load(name)
        found = old[name]
        where, use = (found, found) if isinstance(found, str) else found
        warn_of_old_name(f"{package}.{name}", use=use)
        module, _, new_name = where.rpartition(".")
        return getattr(import_module(module), new_name)

    return get, public.copy, public.copy()


def warn_of_old_name(old: str, *, use: str) -> None:
    """Warns the caller's caller that the next version removes the name `old`, and says what to use instead."""
    warnings.warn(
        f"{old} is an old name, which the next version of hpctrain removes: use {use}",
        DeprecationWarning,
        stacklevel=3,
    )
