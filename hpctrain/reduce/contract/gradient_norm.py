"""Squares of gradients, in little more than the time of reading the memory once, and exact enough for a norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

import torch

from hpctrain.reduce.contract.bucket_plan import Bucket

# Norms are taken of rows of so many elements, and of those in float64: a float32 sum over a whole bucket would
# lose up to a thousandth, a float64 one takes four times as long.
ROW_ELEMS = 1024


def in_rows(gradients: torch.Tensor) -> list[torch.Tensor]:
    """Returns views of shape (rows, elements), none of them empty, that cover `gradients`, shape (n,)."""
    whole = gradients.numel() - gradients.numel() % ROW_ELEMS
    return [rows for rows in (gradients[:whole].view(-1, ROW_ELEMS), gradients[None, whole:]) if rows.numel()]


def square_of(norms: torch.Tensor) -> float:
    """Returns the sum of the squares of `norms`, shape (n,)."""
    norm = float(torch.linalg.vector_norm(norms, dtype=torch.float64))
    return norm * norm  # ** would raise where this is infinite


def square_of_all(tensors: Iterable[torch.Tensor]) -> float:
    """Returns the sum of the squares of all elements of `tensors`, of any shape; infinite or NaN if one of them is.

    Needs memory for one norm in ROW_ELEMS elements, and for a copy of a tensor that is not contiguous.
    """
    return _square_of_rows([rows for tensor in tensors for rows in in_rows(tensor.detach().reshape(-1))])


def _square_of_rows(rows: Sequence[torch.Tensor]) -> float:
    if not rows:
        return 0.0
    square = square_of(torch.cat([_norms(part) for part in rows]))
    if math.isinf(square):  # perhaps only in float32
        norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in rows]
        square = square_of(torch.cat(norms))
    return square


def _norms(rows: torch.Tensor) -> torch.Tensor:
    narrow = rows.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32 if narrow else None)


@final
class GradientSquares:
    """Computes the sum of the squares of the gradients in planned buckets. Other elements of the buckets (flags of used
    parameters, padding) do not count."""

    def __init__(self, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> None:
        """buffers: memory of each bucket, shape (bucket.numel,)."""
        pairs = list(zip(buckets, buffers, strict=True))
        gradients = [buffer[: bucket.num_gradients] for bucket, buffer in pairs if bucket.slots]
        self._rows = [rows for values in gradients for rows in in_rows(values)]

    def of_share(self, share: int, *, num_shares: int) -> float:
        """Returns the sum over part `share` of the gradients; the parts add up to the sum over all."""
        mine = [rows.tensor_split(num_shares)[share] for rows in self._rows]
        return _square_of_rows([rows for rows in mine if rows.numel()])

    def of_all(self) -> float:
        """Returns the sum over all gradients."""
        return self.of_share(0, num_shares=1)
