"""Compares a module's saved state with the module's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.errors import CheckpointError

# The last part of the name of a module's extra state, whose type and shape only the module knows.
_EXTRA_STATE = "_extra_state"


def check_state(saved: Mapping[str, Any], mine: Mapping[str, Any], *, where: str) -> None:
    """Raises CheckpointError, with the differences, unless both have the same names, dtypes and shapes.

    where: begins the message.
    """
    faults = [f"{name} is missing there" for name in mine if name not in saved]
    faults += [f"{name} is unknown here" for name in saved if name not in mine]
    faults += [
        f"{name} is {kind_of(saved[name])} there, {kind_of(mine[name])} here"
        for name in mine
        if name in saved
        and name.rpartition(".")[2] != _EXTRA_STATE
        and kind_of(saved[name]) != kind_of(mine[name])
    ]
    if faults:
        shown = "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else "")
        raise CheckpointError(
            f"{where}: {shown}. Resume with the model it was made from, or start from scratch with --resume never"
        )


def kind_of(value: Any) -> str:
    """Returns the dtype and shape of a tensor, the type of another value."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
