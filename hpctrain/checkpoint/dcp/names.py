"""Names of tensors in checkpoints and in DCP: which path of a nested state dict is which name. Pure.

DCP flattens a nested state dict: its key is the path joined by dots. A name of ours has a slash after the first part of
the path, and the optimizer's state is named as a run names it:

    model.0.weight                    model/0.weight
    optim.state.0.weight.exp_avg      optimizer/0.weight::exp_avg
    ema.0.weight                      ema/0.weight
    counter                           counter
"""

from __future__ import annotations

from typing import TypeAlias

from hpctrain.checkpoint.format.state import SEPARATOR

MODEL, OPTIMIZER, STATE, GROUPS = "model", "optim", "state", "param_groups"
OUR_OPTIMIZER = "optimizer/"

Path: TypeAlias = tuple[str | int, ...]  # of a value in a nested state dict: keys of dicts, indices of lists


def key_of(path: Path) -> str:
    """Returns DCP's key of a path."""
    return ".".join(map(str, path))


def guessed_path(key: str) -> Path:
    """Returns the likely path of a key, for a checkpoint that does not record paths."""
    first, *rest = key.split(".", 1)
    return (first, *rest) if first in (MODEL, OPTIMIZER, OUR_OPTIMIZER[:-1]) else (key,)


def below(path: Path, root: str) -> Path | None:
    """Returns the path below `root`, several parts of it joined by dots; None if it is not below it."""
    parts = tuple(root.split(".")) if root else ()
    return path[len(parts) :] if path[: len(parts)] == parts and len(path) > len(parts) else None


def optimizer_path(path: Path) -> Path | None:
    """Returns (`state`, parameter, key, ...) or (`param_groups`, index, key) of a path in an optimizer's state dict as
    `get_optimizer_state_dict` makes it, also flattened; None for other paths.

    The optimizer may be called "optim" or "optimizer".
    """
    if path[0] not in (OPTIMIZER, OUR_OPTIMIZER[:-1]) or len(path) < 2:
        return None
    rest = path[1:]
    if len(rest) == 1 and isinstance(rest[0], str):  # flatten_optimizer_state_dict=True, or a guessed path
        kind, _, inner = rest[0].partition(".")
        rest = (kind, *(inner.rsplit(".", 1) if kind == STATE else inner.split(".", 1)))
        if kind == GROUPS and len(rest) == 3 and str(rest[1]).isdecimal():
            rest = (kind, int(rest[1]), rest[2])
    is_state = rest[0] == STATE and len(rest) >= 3
    is_group = rest[0] == GROUPS and len(rest) == 3 and isinstance(rest[1], int) and "." not in str(rest[2])
    return rest if is_state or is_group else None


def name_of(path: Path) -> str:
    """Returns our name of the tensor at `path`."""
    found = optimizer_path(path)
    if found is not None and found[0] == STATE:
        return OUR_OPTIMIZER + SEPARATOR.join(map(str, found[1:]))
    first, *rest = map(str, path)
    return f"{first}/{'.'.join(rest)}" if rest else first


def path_of(name: str) -> Path:
    """Returns the path of our tensor `name`; the inverse of `name_of` up to how dots divide it."""
    if name.startswith(OUR_OPTIMIZER) and SEPARATOR in name:
        return (OPTIMIZER, STATE, *name[len(OUR_OPTIMIZER) :].split(SEPARATOR))
    return tuple(name.split("/", 1))
