"""Finds the repeated blocks of a model, such as the layers of a transformer. Does not communicate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpctrain.errors import UsageError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NAMED = "_hpctrain_named_block"


def matches(name: str, pattern: str) -> bool:
    """Returns True if the name of a module matches a pattern, in which `*` stands for any text without a dot."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def name_blocks(model: nn.Module, patterns: Sequence[str]) -> None:
    """Makes `repeated_blocks` return the modules with these names, for the model and for its submodules.

    patterns: module names, in which `*` stands for any text without a dot.

    Raises UsageError if a pattern matches no module, or if a matched module has no parameters, has no forward of its
    own, or lies within another matched module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        fitting = {name: module for name, module in modules.items() if matches(name, pattern)}
        if not fitting:
            shown = ", ".join(list(modules)[:12]) + (", ..." if len(modules) > 12 else "")
            raise UsageError(f"`blocks` names {pattern!r}, which the model does not have; it has {shown}")
        found |= fitting
    for name, module in found.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise UsageError(
                f"`blocks` names {name}, which only contains other modules: name those instead, as {name}.*"
            )
        if not any(True for _ in module.parameters()):
            raise UsageError(f"`blocks` names {name}, which has no parameters: leave it out")
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise UsageError(f"`blocks` names {name} and {outer}, which contains it: name only one of them")
    for module in found.values():
        setattr(module, _NAMED, True)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the model's blocks by name: the modules given to `name_blocks`, if called. Blocks are not nested.

    Otherwise a block is a module with children and parameters whose parent has several children of the same class.
    Containers (`nn.Sequential`, `nn.ModuleList`, `nn.ModuleDict`) are searched for blocks first. One of several
    `nn.Sequential`s is itself a block if it contains no block. `nn.ModuleList` and `nn.ModuleDict` are never blocks,
    since they have no forward.
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
    """Returns the parameters that are shared by two blocks, or by a block and a module outside all blocks.

    Each entry is a pair: the two names of one parameter.
    """
    first: dict[int, tuple[str, str]] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        known, its_block = first.setdefault(id(parameter), (name, block))
        if its_block != block:
            pairs.append((known, name))
    return pairs
