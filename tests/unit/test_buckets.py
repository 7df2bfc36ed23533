"""Bucket plans: every parameter once, one dtype a bucket, sizes kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import UsageError
from hpctrain.reduce.buckets import GradientSpec, plan_buckets

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
SPECS = st.lists(st.builds(GradientSpec, st.integers(0, 300), DTYPES), min_size=1, max_size=30)


@given(specs=SPECS, bucket_bytes=st.integers(1, 2000))
def test_every_gradient_has_its_own_place_in_one_bucket(specs: list[GradientSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)
    assert sorted(slot.parameter for b in buckets for slot in b.slots) == list(range(len(specs)))
    for bucket in buckets:
        taken = [p for s in bucket.slots for p in (*range(s.offset, s.offset + s.numel), s.used_flag)]
        assert sorted(taken) == list(range(bucket.numel))
        assert all(specs[slot.parameter].dtype == bucket.dtype for slot in bucket.slots)
        assert all(specs[slot.parameter].numel == slot.numel for slot in bucket.slots)


@given(specs=SPECS, bucket_bytes=st.integers(1, 2000))
def test_a_bucket_is_over_its_size_only_for_one_large_gradient(
    specs: list[GradientSpec], bucket_bytes: int
) -> None:
    for bucket in plan_buckets(specs, bucket_bytes=bucket_bytes):
        filled = sum(slot.numel for slot in bucket.slots) * bucket.dtype.itemsize
        with_bytes = [slot for slot in bucket.slots if slot.numel]
        assert filled <= bucket_bytes or len(with_bytes) == 1


def test_the_last_parameters_leave_first() -> None:
    specs = [GradientSpec(10, torch.float32) for _ in range(4)]
    buckets = plan_buckets(specs, bucket_bytes=80)
    assert [[slot.parameter for slot in b.slots] for b in buckets] == [[3, 2], [1, 0]]


def test_a_bucket_needs_a_size() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        plan_buckets([GradientSpec(1, torch.float32)], bucket_bytes=0)
