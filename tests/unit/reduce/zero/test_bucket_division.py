"""Which rank owns which elements: each exactly once, in shares that are even but for their alignment."""

from __future__ import annotations

import pytest
import torch

from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets
from hpctrain.reduce.zero.bucket_division import ALIGNMENT_ELEMS, BucketDivision, ParameterSpan

NUMELS = [1, 300, 0, 64, 7, 5000, 129]


def plan_of(num_ranks: int, *, align_elems: int, bucket_bytes: int = 2000) -> BucketDivision:
    specs = [GradientSpec(numel, torch.float32) for numel in NUMELS]
    buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)
    return BucketDivision.of(buckets, num_ranks=num_ranks, unit_bytes=bucket_bytes, align_elems=align_elems)


def elements(spans: list[ParameterSpan]) -> list[tuple[int, int]]:
    return [(s.parameter, element) for s in spans for element in range(s.begin, s.begin + s.numel)]


EVERY = [(index, element) for index, numel in enumerate(NUMELS) for element in range(numel)]


@pytest.mark.parametrize("align_elems", [1, ALIGNMENT_ELEMS])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_each_element_has_one_owner_and_is_in_one_unit(num_ranks: int, align_elems: int) -> None:
    plan = plan_of(num_ranks, align_elems=align_elems)
    owned = [
        element for rank in range(num_ranks) for spans in plan.owned_by(rank) for element in elements(spans)
    ]
    assert sorted(owned) == EVERY
    assert sorted(element for unit in plan.units for element in elements(unit.joined())) == EVERY
    for rank in range(num_ranks):
        mine = sorted(element for spans in plan.owned_by(rank) for element in elements(spans))
        in_units = sorted(element for unit in plan.units for element in elements(list(unit.spans[rank])))
        assert in_units == mine


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_shares_are_even_and_end_at_whole_vectors(num_ranks: int) -> None:
    for align_elems in (1, ALIGNMENT_ELEMS):
        plan = plan_of(num_ranks, align_elems=align_elems)
        for bucket, shares in zip(plan.buckets, plan.shares, strict=True):
            for share in shares:
                assert abs(share.numel - bucket.num_gradients / num_ranks) < align_elems + 1
        for rank in range(num_ranks):
            for spans in plan.owned_by(rank):
                assert all(span.begin % align_elems == 0 for span in spans)
                assert len({span.parameter for span in spans}) == len(spans)


def test_a_unit_lies_in_its_memory_without_gaps_and_is_no_larger_than_asked_for() -> None:
    plan = plan_of(3, align_elems=ALIGNMENT_ELEMS)
    for unit in plan.units:
        assert unit.numel * 4 <= 2000 + 3 * 4
        taken = [place for s in unit.joined() for place in range(s.place, s.place + s.numel)]
        assert taken == list(range(unit.numel))
    # The parameter of 20,000 bytes.
    assert max(sum(unit.bucket == number for unit in plan.units) for number in range(len(plan.buckets))) == 10
