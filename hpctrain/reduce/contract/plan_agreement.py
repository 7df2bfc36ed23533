"""Checks, before the first byte is sent, that every rank reduces the same buckets in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hpctrain.comm import Collective, check_same
from hpctrain.errors import BufferMismatch, UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket


def check_same_plan(comm: Collective, buckets: Sequence[Bucket], *, how: str) -> None:
    """Raises BufferMismatch on every rank, naming the ranks that differ, unless all pass the same plan. Collective.

    how: the reducer's name and settings, as one line.
    """
    layout = repr([
        (str(b.dtype), b.numel, [(s.parameter, s.offset, s.numel, s.used_flag) for s in b.slots]) for b in buckets
    ])  # fmt: skip
    sizes = " + ".join(f"{b.numel} x {str(b.dtype).removeprefix('torch.')}" for b in buckets[:4])
    more = f" + {len(buckets) - 4} more" if len(buckets) > 4 else ""
    mark = hashlib.blake2b(layout.encode(), digest_size=4).hexdigest()
    check_same(
        comm, name="the plan of gradient buckets", value=f"{how}: {sizes}{more} (layout {mark})",
        error=BufferMismatch,
    )  # fmt: skip


def check_dtypes(buckets: Sequence[Bucket], *, what: str) -> None:
    """Raises UsageError unless all buckets are float32 or float64; on all ranks if `check_same_plan` passed."""
    for bucket in buckets:
        if bucket.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"{what} reduction needs buckets of float32 or float64, not {bucket.dtype}", agreed=True
            )
