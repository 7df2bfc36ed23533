"""The repeated blocks of a model, such as the layers of a transformer. Nothing here communicates."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the model's blocks by name, none within another.

    A block is a module with children and parameters, of whose class its parent holds several. A container
    (`nn.Sequential`, `nn.ModuleList`, `nn.ModuleDict`) is searched first. An `nn.Sequential` in which nothing is a
    block is one; the others have no forward.
    """
    return dict(_blocks_in(model, prefix=""))


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
