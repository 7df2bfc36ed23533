"""Bucket plans: every parameter once, one dtype a bucket, sizes kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import GradientSpec, completed_order, plan_buckets

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
SPECS = st.lists(st.builds(GradientSpec, st.integers(0, 300), DTYPES), min_size=1, max_size=30)


@given(specs=SPECS, bucket_bytes=st.integers(1, 2000))
def test_every_gradient_has_its_own_place_in_one_bucket(specs: list[GradientSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)
    assert sorted(slot.parameter for b in buckets for slot in b.slots) == list(range(len(specs)))
    for bucket in buckets:
        taken = [place for s in bucket.slots for place in range(s.offset, s.offset + s.numel)]
        assert sorted(taken) == list(range(bucket.num_gradients))
        flags = [slot.used_flag for slot in bucket.slots]
        assert flags == list(range(bucket.first_flag, bucket.numel))
        # No block of 256 values, wherever it begins, holds a gradient and a flag.
        assert bucket.first_flag - (bucket.num_gradients - 1) >= 256
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


@given(specs=SPECS, bucket_bytes=st.integers(1, 2000), data=st.data())
def test_buckets_fill_in_the_order_given_and_keep_each_gradients_position(
    specs: list[GradientSpec], bucket_bytes: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(specs))))
    buckets = plan_buckets(specs, bucket_bytes=bucket_bytes, order=order)
    for dtype in {spec.dtype for spec in specs}:
        filled = [slot.parameter for b in buckets if b.dtype is dtype for slot in b.slots]
        assert filled == [index for index in order if specs[index].dtype is dtype]
    positions = {slot.parameter: slot.position for b in buckets for slot in b.slots}
    assert [positions[i] for i in range(len(specs))] == [
        sum(spec.numel for spec in specs[:i]) for i in range(len(specs))
    ]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 2, 3], [1, 2, 3]])
def test_an_order_that_does_not_name_each_gradient_once_is_refused(order: list[int]) -> None:
    with pytest.raises(UsageError, match="each once"):
        plan_buckets([GradientSpec(1, torch.float32)] * 3, bucket_bytes=8, order=order)


@given(st.permutations(range(12)), st.integers(0, 12))
def test_parameters_without_a_gradient_come_behind_those_that_had_one(ready: list[int], seen: int) -> None:
    order = completed_order(ready[:seen], num_parameters=12)
    assert order[:seen] == ready[:seen]
    assert order[seen:] == sorted(ready[seen:], reverse=True)


def test_the_last_parameters_leave_first() -> None:
    specs = [GradientSpec(10, torch.float32) for _ in range(4)]
    buckets = plan_buckets(specs, bucket_bytes=80)
    assert [[slot.parameter for slot in b.slots] for b in buckets] == [[3, 2], [1, 0]]


def test_a_bucket_needs_a_size() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        plan_buckets([GradientSpec(1, torch.float32)], bucket_bytes=0)
