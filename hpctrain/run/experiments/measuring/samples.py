"""Which samples ranks get: repeated, missing, depending on the rank, in an order that ignores the epoch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFacts:
    """What is known of the samples.

    num_seen: samples in the pass over an epoch, of one process. repeated_one: in one process, sample -> times.
    has_equal: these may be different samples of equal content.
    repeated: over all ranks, beyond what one process has. missing: that one process gets and no rank does. padded:
    samples that complete the last batch of some ranks, at most one a rank. not_finite: field -> some samples.
    content_by_rank: samples whose content differs between ranks although each read the same batch alone.
    content_by_share: whose content differs between one process and the ranks. content_changes: between two runs of one
    process. content_unstable: between two readings of one epoch by one process. order_changes: two runs of one process
    get the same samples in other orders. draws: the process's generators that reading uses; looked for only where
    contents differ. is_numbered: the samples' numbers are known, else hashes of their content. other_steps: the
    first step in which the ranks together get other samples than one process, 0 if none.
    same_every_epoch: the shuffled order of two epochs is the same. history: an epoch's samples depend on what was read
    before it. num_rows, num_rank_rows: samples of one step in one process, and over all ranks.
    """

    num_seen: int = 0
    repeated_one: Mapping[str, int] = field(default_factory=dict)
    has_equal: bool = False
    repeated: Mapping[str, int] = field(default_factory=dict)
    missing: int = 0
    padded: int = 0
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
    """Returns a hash of each row's content over all fields."""
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
    """Returns (row, field) of floating-point values that are not finite."""
    found: list[tuple[int, str]] = []
    for name, tensor in fields.items():
        if tensor.is_floating_point() and tensor.shape[:1] == (num_rows,) and tensor.numel():
            bad = ~tensor.detach().reshape(num_rows, -1).isfinite().all(dim=1)
            found += [(int(row), name) for row in bad.nonzero().flatten()]
    return found


def as_fields(batch: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a batch of a user's loader, which may be nested, by name."""
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
    """Returns how often the samples occur that occur more than once."""
    return {str(name): times for name, times in Counter(seen).items() if times > 1}


def repeats_beyond(one: Sequence[int], ranks: Sequence[Sequence[int]]) -> tuple[dict[str, int], int]:
    """Returns what all ranks together get more often than one process, and how many samples no rank gets."""
    expected, found = Counter(one), Counter(name for rank in ranks for name in rank)
    more = {str(name): times for name, times in found.items() if times > max(1, expected[name])}
    return more, sum((expected - found).values())
