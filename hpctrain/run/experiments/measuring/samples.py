"""Finds out which samples the ranks get: repeated, missing, rank-dependent, or the same order in every epoch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFacts:
    """Facts about the samples that one process and all ranks get.

    Samples are named by their index in the dataset, or by a hash of their content if `is_numbered` is False.

    - num_seen: the number of samples that one process reads in a pass over an epoch.
    - repeated_one: for each sample that one process gets more than once, how often it gets the sample.
    - has_equal: whether samples that seem to be repeated may be different samples with equal content.
    - repeated: for each sample that the ranks together get more than once, and more often than one process, how often
      the ranks get the sample.
    - missing: the number of samples that one process gets and no rank gets.
    - not_finite: the samples with NaN or infinity, by field.
    - content_by_rank: samples whose content differs between ranks that each read the same batch alone.
    - content_by_share: samples whose content differs between an epoch that the ranks read together and an epoch that
      one process reads.
    - content_changes: samples whose content differs between two runs of one process.
    - content_unstable: samples whose content differs between two readings of an epoch by one process.
    - order_changes: whether two runs of one process get the same samples in different orders.
    - draws: the random number generators of the process that are used while samples are read; determined only if
      contents differ.
    - other_steps: the first step, from 1, in which the ranks together get other samples than one process; 0 if there is
      no such step.
    - same_every_epoch: whether the shuffled orders of two epochs are equal.
    - history: whether the samples of an epoch depend on what was read before that epoch.
    - num_rows, num_rank_rows: the number of samples of the step `other_steps` in one process and on all ranks.
    """

    num_seen: int = 0
    repeated_one: Mapping[str, int] = field(default_factory=dict)
    has_equal: bool = False
    repeated: Mapping[str, int] = field(default_factory=dict)
    missing: int = 0
    not_finite: Mapping[str, Sequence[int]] = field(default_factory=dict)
    content_by_rank: Sequence[int] = ()
    content_by_share: Sequence[int] = ()
    content_changes: Sequence[int] = ()
    content_unstable: Sequence[int] = ()
    order_changes: bool = False
    draws: Sequence[str] = ()
    is_numbered: bool = True
    other_steps: int = 0
    same_every_epoch: bool = False
    history: bool = False
    num_rows: int = 0
    num_rank_rows: int = 0


def row_hashes(fields: Mapping[str, torch.Tensor], num_rows: int) -> list[int]:
    """Returns a hash of the content of each row over all fields."""
    hashes = [xxhash.xxh3_64() for _ in range(num_rows)]
    for name in sorted(fields):
        tensor = fields[name].detach().to("cpu").contiguous()
        if tensor.shape[:1] != (num_rows,) or not num_rows:
            continue
        rows = tensor.reshape(num_rows, -1).view(torch.uint8).numpy() if tensor.numel() else None
        for number, hashed in enumerate(hashes):
            hashed.update(b"" if rows is None else rows[number].tobytes())
    return [hashed.intdigest() for hashed in hashes]


def rows_not_finite(fields: Mapping[str, torch.Tensor], num_rows: int) -> list[tuple[int, str]]:
    """Returns (row, field) for each row of a floating-point field that has NaN or infinity."""
    found: list[tuple[int, str]] = []
    for name, tensor in fields.items():
        if tensor.is_floating_point() and tensor.shape[:1] == (num_rows,) and tensor.numel():
            bad = ~tensor.detach().reshape(num_rows, -1).isfinite().all(dim=1)
            found += [(int(row), name) for row in bad.nonzero().flatten()]
    return found


def as_fields(batch: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a user's batch, which may be nested, by name."""
    if isinstance(batch, torch.Tensor):
        return {"batch": batch}
    fields = getattr(batch, "fields", None)
    if isinstance(fields, dict):
        return dict(fields)
    items = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate(batch)
        if isinstance(batch, list | tuple)
        else ()
    )
    found = {}
    for key, value in items:
        for name, tensor in as_fields(value).items():
            found[str(key) if name == "batch" else f"{key}.{name}"] = tensor
    return found


def repeats(seen: Sequence[int]) -> dict[str, int]:
    """Returns, for each sample that occurs more than once, how often it occurs."""
    return {str(name): times for name, times in Counter(seen).items() if times > 1}


def repeats_beyond(one: Sequence[int], ranks: Sequence[Sequence[int]]) -> tuple[dict[str, int], int]:
    """Returns, for each sample that all ranks together get more often than one process, how often the ranks get it.

    Samples that the ranks together get only once are left out. Also returns the number of samples that one process gets
    and no rank gets.
    """
    expected, found = Counter(one), Counter(name for rank in ranks for name in rank)
    more = {str(name): times for name, times in found.items() if times > max(1, expected[name])}
    return more, sum((expected - found).values())
