"""Which gradient goes into which bucket. Pure planning.

Parameters are taken in reverse order of registration, the order in which backward makes most gradients
ready, so that the first bucket can leave while backward still runs (Li et al. 2020, arXiv:2006.15704). A
bucket holds one dtype. Behind its gradients a bucket carries one element per parameter that says whether the
rank had a gradient for it: a parameter that no rank used keeps no gradient, as on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpctrain.errors import UsageError


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one parameter's gradient in its bucket, in elements."""

    parameter: int
    offset: int
    numel: int
    used_flag: int  # offset of the element that says the gradient was there


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message. `numel` counts gradients and flags."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What the plan needs to know of a parameter."""

    numel: int
    dtype: torch.dtype


def plan_buckets(specs: Sequence[GradientSpec], *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets up to `bucket_bytes` of gradients; a larger parameter has a bucket of its own."""
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes is {bucket_bytes}: give at least 1")
    closed: list[tuple[torch.dtype, list[int]]] = []
    open_by_dtype: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in reversed(range(len(specs))):
        spec = specs[index]
        num_bytes = spec.numel * spec.dtype.itemsize
        members, filled = open_by_dtype.get(spec.dtype, ([], 0))
        if members and filled + num_bytes > bucket_bytes:
            closed.append((spec.dtype, members))
            members, filled = [], 0
        open_by_dtype[spec.dtype] = ([*members, index], filled + num_bytes)
    closed.extend((dtype, members) for dtype, (members, _) in open_by_dtype.items())
    return tuple(_layout(dtype, members, specs) for dtype, members in closed)


def _layout(dtype: torch.dtype, members: Sequence[int], specs: Sequence[GradientSpec]) -> Bucket:
    gradients = sum(specs[index].numel for index in members)
    slots = []
    offset = 0
    for place, index in enumerate(members):
        slots.append(Slot(index, offset, specs[index].numel, used_flag=gradients + place))
        offset += specs[index].numel
    return Bucket(dtype, tuple(slots), gradients + len(members))
