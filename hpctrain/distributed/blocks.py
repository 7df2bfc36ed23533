"""The repeated blocks of a model, such as the layers of a transformer. Nothing here communicates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpctrain.errors import UsageError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NAMED = "_hpctrain_named_block"


def matches(name: str, pattern: str) -> bool:
    """Returns True if the name of a module fits a pattern, in which `*` stands for any text without a dot."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def name_blocks(model: nn.Module, patterns: Sequence[str]) -> None:
    """Makes `repeated_blocks` return the modules of these names, for the model and for modules of it.

    patterns: names, in which `*` stands for any text without a dot. Raises UsageError for one that fits no module, and
    for a module without parameters, without a forward of its own, or within another one.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        fitting = {name: module for name, module in modules.items() if matches(name, pattern)}
        if not fitting:
            shown = ", ".join(list(modules)[:12]) + (", ..." if len(modules) > 12 else "")
            raise UsageError(f"blocks name {pattern!r}, which the model does not have; it has {shown}")
        found |= fitting
    for name, module in found.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise UsageError(f"blocks name {name}, which only holds others: name these, as {name}.*")
        if not any(True for _ in module.parameters()):
            raise UsageError(f"blocks name {name}, which has no parameters: leave it out")
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise UsageError(f"blocks name {name} and {outer}, which contains it: name one of them")
    for module in found.values():
        setattr(module, _NAMED, True)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the model's blocks by name, none within another: those of `name_blocks`, if there are some.

    Otherwise a block is a module with children and parameters, of whose class its parent holds several. A container
    (`nn.Sequential`, `nn.ModuleList`, `nn.ModuleDict`) is searched first. An `nn.Sequential` in which nothing is a
    block is one; the others have no forward.
    """
    named = {name: module for name, module in model.named_modules() if name and hasattr(module, _NAMED)}
    return named or dict(_blocks_in(model, prefix=""))


def _blocks_in(module: nn.Module, *, prefix: str) -> list[tuple[str, nn.Module]]:
    of_class: dict[type, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, child in module.named_children():
        if any(True for _ in child.parameters()) and any(True for _ in child.children()):
            of_class[type(child)].append((f"{prefix}{name}", child))
    found: list[tuple[str, nn.Module]] = []
    for kind, siblings in of_class.items():
        repeated = len(siblings) > 1
        for name, child in siblings:
            inner = [] if repeated and kind not in _CONTAINERS else _blocks_in(child, prefix=f"{name}.")
            is_block = repeated and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            found += inner or ([(name, child)] if is_block else [])
    return found


def tied_across(model: nn.Module, blocks: dict[str, nn.Module]) -> list[tuple[str, str]]:
    """Returns pairs of names of one parameter that lie in different blocks, or in a block and outside of all."""
    first: dict[int, tuple[str, str]] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        known, its_block = first.setdefault(id(parameter), (name, block))
        if its_block != block:
            pairs.append((known, name))
    return pairs
