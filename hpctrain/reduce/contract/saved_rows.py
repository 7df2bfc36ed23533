"""Rows of a saved tensor: a rank reads those that it needs, not the rows of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpctrain.reduce.contract.bucket_reducer import Shapes


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """Returns the shape of each tensor by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def rows_in(saved: torch.Tensor, *, rows: Sequence[range]) -> torch.Tensor:
    """Returns the rows `rows`, shape (number of these rows, ...).

    saved: a whole tensor, shape (all rows, ...), from which they are taken, or just these rows, which is returned as it
    is. rows: ascending, without overlap.
    """
    if saved.shape[0] == sum(map(len, rows)):
        return saved
    return torch.cat([saved[found.start : found.stop] for found in rows])
