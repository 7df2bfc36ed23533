"""Which gradient goes into which bucket. Pure planning.

Parameters are taken in the order in which their gradients become ready, so that the first bucket can leave
while backward still runs (Li et al. 2020, arXiv:2006.15704). Before that order has been seen it is guessed:
the reverse of the order of registration. A bucket holds gradients of one dtype. Behind them, after a gap, it
carries one element per parameter that says whether the rank had a gradient for it: a parameter that no rank
used keeps no gradient, as on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hpctrain.errors import UsageError

# Zeros between gradients and flags. A codec with one scale for a block of 256 values never meets both in one
# block, wherever it begins: beside a flag of 1 small gradients would vanish, beside large ones the flag.
FLAG_GAP = 255


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one parameter's gradient in its bucket, in elements.

    parameter: its number in the optimizer's order. used_flag: offset of the element that says the gradient was
    there. position: where it begins in gradient space, which is all
    parameters flattened one behind another in the optimizer's order; the same whatever the buckets are.
    shape: of the gradient as it lies in memory, outermost dimension first; empty where nobody said it.
    """

    parameter: int
    offset: int
    numel: int
    used_flag: int
    position: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Bucket:
    """One reduction. `numel` counts gradients, gap and flags; there is at least one slot."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int

    @property
    def num_gradients(self) -> int:
        """Elements that are gradients: the first ones."""
        return self.slots[-1].offset + self.slots[-1].numel

    @property
    def first_flag(self) -> int:
        """Offset of the flags, one for each slot, in the order of the slots, to the end."""
        return self.slots[0].used_flag


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What the plan needs to know of a gradient. dtype: in which it is summed; see `sum_dtype`."""

    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


def sum_dtype(parameter: torch.dtype) -> torch.dtype:
    """dtype in which gradients of a parameter's dtype are summed over the ranks.

    float64 in float64, all else in float32: half types lose bits in each addition.
    """
    return torch.float64 if parameter in (torch.float64, torch.complex128) else torch.float32


def plan_buckets(
    specs: Sequence[GradientSpec], *, bucket_bytes: int, order: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Returns buckets of up to `bucket_bytes` of gradients each; a larger gradient has a bucket of its own.

    order: every parameter's number once, in the order in which gradients become ready; None: the last parameter first.
    Raises UsageError for a size below 1 or an order that does not name each parameter once.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes is {bucket_bytes}: give at least 1")
    order = default_order(len(specs)) if order is None else order
    if sorted(order) != list(range(len(specs))):
        raise UsageError(f"the order of {len(specs)} gradients does not name each once: {list(order)[:20]}")
    closed: list[tuple[torch.dtype, list[int]]] = []
    open_by_dtype: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in order:
        spec = specs[index]
        num_bytes = spec.numel * spec.dtype.itemsize
        members, filled = open_by_dtype.get(spec.dtype, ([], 0))
        if members and filled + num_bytes > bucket_bytes:
            closed.append((spec.dtype, members))
            members, filled = [], 0
        open_by_dtype[spec.dtype] = ([*members, index], filled + num_bytes)
    closed.extend((dtype, members) for dtype, (members, _) in open_by_dtype.items())
    positions = list(accumulate((spec.numel for spec in specs), initial=0))
    return tuple(_layout(dtype, members, specs, positions) for dtype, members in closed)


@dataclass(frozen=True, slots=True)
class Milestone:
    """The first `num_elems` elements of bucket `bucket` are written when the gradients of `parameters` are."""

    bucket: int
    num_elems: int
    parameters: tuple[int, ...]


def milestones(buckets: Sequence[Bucket], *, least_elems: int) -> dict[int, Milestone]:
    """Returns when to announce that a bucket is partly filled, by the parameter whose gradient completes that part.

    Only in the last bucket of each dtype, each time half of the rest is written, at least `least_elems` elements: that
    is seldom, and little is left after the last announcement. The other buckets are announced when they are full.
    """
    found: dict[int, Milestone] = {}
    for number in {bucket.dtype: number for number, bucket in enumerate(buckets)}.values():
        bucket, said, parameters = buckets[number], 0, []
        for slot in bucket.slots[:-1]:
            parameters.append(slot.parameter)
            end = slot.offset + slot.numel
            if end - said >= max(least_elems, (bucket.num_gradients - said) / 2):
                found[slot.parameter] = Milestone(number, end, tuple(parameters))
                said = end
    return found


def default_order(num_parameters: int) -> list[int]:
    """Returns the order that is assumed before one was seen: backward begins with what forward used last."""
    return list(reversed(range(num_parameters)))


def completed_order(seen: Sequence[int], *, num_parameters: int) -> list[int]:
    """Returns `seen`, in which gradients became ready, followed by the parameters that had none."""
    known = set(seen)
    return [*seen, *(index for index in default_order(num_parameters) if index not in known)]


def _layout(
    dtype: torch.dtype, members: Sequence[int], specs: Sequence[GradientSpec], positions: Sequence[int]
) -> Bucket:
    first_flag = sum(specs[index].numel for index in members) + FLAG_GAP
    slots = []
    offset = 0
    for place, index in enumerate(members):
        spec = specs[index]
        slots.append(Slot(index, offset, spec.numel, first_flag + place, positions[index], spec.shape))
        offset += spec.numel
    return Bucket(dtype, tuple(slots), first_flag + len(members))
