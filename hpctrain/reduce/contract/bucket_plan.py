"""Assignment of gradients to buckets. Pure planning.

Parameters are assigned to buckets in the order in which their gradients become ready, so that the first bucket can be
reduced while backward still runs (Li et al. 2020, arXiv:2006.15704). Until that order is known, the reverse of the
order of registration is used.

A bucket holds gradients of one dtype, then a gap, then one flag element per parameter, which is 1 if the rank had a
gradient for it. A parameter that no rank used gets no gradient, as in training on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hpctrain.errors import UsageError

# Zeros between gradients and flags, so that no block of 256 values that a codec encodes with one scale holds both:
# next to a flag of 1 small gradients would be rounded to 0, next to large gradients the flag would be.
FLAG_GAP = 255


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one parameter's gradient in its bucket, in elements.

    parameter: index of the parameter in the optimizer's order.
    offset, numel: position of the gradient in the bucket, and its number of elements.
    used_flag: position in the bucket of the parameter's flag, which is 1 if the rank had a gradient for the parameter.
    position: offset of the gradient in gradient space, the concatenation of all flattened parameters in the
    optimizer's order. The offset does not depend on the buckets.
    shape: shape of the gradient in memory order, outermost dimension first; empty if unknown.
    """

    parameter: int
    offset: int
    numel: int
    used_flag: int
    position: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Bucket:
    """A buffer of gradients that is reduced as a whole. A bucket has at least one slot (place of a gradient).

    numel: number of elements, including gap and flags.
    """

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int

    @property
    def num_gradients(self) -> int:
        """Number of gradient elements, which come first in the bucket."""
        return self.slots[-1].offset + self.slots[-1].numel

    @property
    def first_flag(self) -> int:
        """Position of the first flag in the bucket. The flags of all parameters, in their order, end the bucket."""
        return self.slots[0].used_flag


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """The properties of a gradient on which the plan depends.

    numel: number of elements.
    dtype: dtype in which the gradient is summed; see `sum_dtype`.
    shape: shape of the gradient in memory order; empty if unknown.
    """

    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


def sum_dtype(parameter: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of parameters of dtype `parameter` are summed over the ranks.

    The result is float64 for float64 (and complex128), and float32 for all other dtypes, because half-precision types
    lose bits in each addition.
    """
    return torch.float64 if parameter in (torch.float64, torch.complex128) else torch.float32


def plan_buckets(
    specs: Sequence[GradientSpec], *, bucket_bytes: int, order: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Returns buckets with up to `bucket_bytes` of gradients each; a larger gradient gets a bucket of its own.

    order: indices of all parameters, in the order in which their gradients become ready; None: the last parameter
    first.

    Raises UsageError for a size below 1, or an order that does not contain each parameter once.
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
    """A partly filled bucket: its first elements are complete once the gradients of `parameters` are written.

    bucket: index of the bucket.
    num_elems: number of these elements.
    parameters: indices of the parameters.
    """

    bucket: int
    num_elems: int
    parameters: tuple[int, ...]


def milestones(buckets: Sequence[Bucket], *, least_elems: int) -> dict[int, Milestone]:
    """Returns the milestones, after which to announce that a bucket is partly filled.

    The key of a milestone is the index of the parameter whose gradient completes it. Only the last bucket of each dtype
    has milestones. Each milestone adds at least half of the elements that remained after the previous one, and at least
    `least_elems`: so there are few announcements, and few elements remain after the last one. The other buckets are
    announced when they are full.
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
    """Returns the order that is assumed until an order is observed: the last parameter first.

    Backward starts with the parameters that forward used last.
    """
    return list(reversed(range(num_parameters)))


def completed_order(seen: Sequence[int], *, num_parameters: int) -> list[int]:
    """Returns `seen`, the order in which gradients became ready, followed by the parameters without a gradient."""
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
