"""Messages of the low-rank reduction and their layout. Does not communicate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from hpctrain.reduce.contract.bucket_plan import Bucket, Slot

# A matrix is sent as factors if they have at most 1/MIN_SAVING of its elements: a smaller saving is not worth the
# computation and the error of the approximation.
MIN_SAVING = 2


def matrix_shape(shape: Sequence[int], *, rank: int) -> tuple[int, int] | None:
    """Returns rows and columns of a parameter that is sent as factors with `rank` columns; None if it is not."""
    if len(shape) < 2 or 0 in shape:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if MIN_SAVING * rank * (rows + columns) <= rows * columns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredMatrix:
    """Views for one parameter: its matrix in the bucket's memory, its factors in the messages.

    m: (rows, columns). p: (rows, rank). q: (columns, rank).
    """

    slot: Slot
    m: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor


@final
class FactoredBucket:
    """A bucket's memory and its two messages.

    `first`: P of every matrix, the gradients that are sent unchanged, the flags, and one element that is NaN if this
    rank's values are not finite, else 0. `second`: Q of every matrix. Both are empty if no parameter has factors.
    """

    def __init__(self, bucket: Bucket, *, rank: int, device: torch.device) -> None:
        self.bucket = bucket
        self.memory = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
        shapes = {slot.parameter: matrix_shape(slot.shape, rank=rank) for slot in bucket.slots}
        self.plain = tuple(slot for slot in bucket.slots if shapes[slot.parameter] is None)
        found = [(slot, shape) for slot in bucket.slots if (shape := shapes[slot.parameter]) is not None]
        self._p_elems = sum(rows for _, (rows, _) in found) * rank
        q_elems = sum(columns for _, (_, columns) in found) * rank
        first = self._p_elems + sum(slot.numel for slot in self.plain) + len(bucket.slots) + 1
        self.first = self.memory.new_zeros(first if found else 0)
        self.second = self.memory.new_zeros(q_elems)
        matrices, p_offset, q_offset = [], 0, 0
        for slot, (rows, columns) in found:
            p_end, q_end = p_offset + rows * rank, q_offset + columns * rank
            matrices.append(FactoredMatrix(
                slot=slot,
                m=self.of(slot).view(rows, columns),
                p=self.first[p_offset:p_end].view(rows, rank),
                q=self.second[q_offset:q_end].view(columns, rank),
            ))  # fmt: skip
            p_offset, q_offset = p_end, q_end
        self.matrices = tuple(matrices)

    def of(self, slot: Slot) -> torch.Tensor:
        """Returns the parameter's part of the bucket's memory, shape (slot.numel,)."""
        return self.memory[slot.offset : slot.offset + slot.numel]

    def pack_plain(self) -> None:
        """Copies the unchanged gradients, the flags and the finite mark into the first message."""
        offset = self._p_elems
        for slot in self.plain:
            self.first[offset : offset + slot.numel] = self.of(slot)
            offset += slot.numel
        self.first[offset:-1] = self.memory[self.bucket.first_flag :]
        # A product with zeros may hide a NaN, depending on the library.
        self.first[-1] = 0.0 if bool(torch.isfinite(self.memory).all()) else torch.nan

    def unpack_plain(self) -> None:
        """Copies the sums of the unchanged gradients and the flags from the first message into the bucket."""
        offset = self._p_elems
        for slot in self.plain:
            self.of(slot).copy_(self.first[offset : offset + slot.numel])
            offset += slot.numel
        self.memory[self.bucket.first_flag :] = self.first[offset:-1]

    def used(self) -> dict[int, bool]:
        """Returns for each parameter True if any rank had a gradient for it. Call after the flags are summed."""
        flags = self.memory[self.bucket.first_flag :].tolist()
        return {slot.parameter: flag != 0 for slot, flag in zip(self.bucket.slots, flags, strict=True)}
