from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpctrain.data.order.epoch_order import EpochOrder, LastBatch, num_batches, rank_share
from hpctrain.errors import DataError, RecipeError
from tests.unit.data.order.order_cases import batch_spans


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 1000))
def test_an_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = EpochOrder(num_samples=num_samples, seed=seed, epoch=epoch).at(0, num_samples)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_samples))


def test_an_epoch_holds_every_sample_once_for_every_small_number_of_samples() -> None:
    for num_samples in [*range(1, 260), 65535, 65536, 65537]:
        order = EpochOrder(num_samples=num_samples, seed=7).at(0, num_samples)
        assert np.array_equal(np.sort(order), np.arange(num_samples)), num_samples


@given(st.integers(10**6, 2**62), st.integers(0, 2**32), st.data())
def test_sampled_positions_of_huge_epochs_are_distinct_and_inside(
    num_samples: int, seed: int, data: st.DataObject
) -> None:
    order = EpochOrder(num_samples=num_samples, seed=seed)
    starts = data.draw(st.lists(st.integers(0, num_samples - 100), min_size=1, max_size=5))
    positions = {position for start in starts for position in range(start, start + 100)}
    found = {p + i: int(v) for p in starts for i, v in enumerate(order.at(p, p + 100))}
    assert set(found) == positions
    assert len(set(found.values())) == len(positions)
    assert all(0 <= value < num_samples for value in found.values())


@given(st.integers(1, 3000), st.data())
def test_a_part_of_the_order_is_the_same_as_in_the_whole(num_samples: int, data: st.DataObject) -> None:
    order = EpochOrder(num_samples=num_samples, seed=5, epoch=2)
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples))
    assert np.array_equal(order.at(start, stop), order.at(0, num_samples)[start:stop])


def test_the_order_stays_what_it_is() -> None:
    """A checkpoint holds a place in this order: if it must change, change ORDER_NAME too."""
    assert EpochOrder(num_samples=10, seed=0, epoch=0).at(0, 10).tolist() == GOLDEN_10
    assert EpochOrder(num_samples=10**9, seed=42, epoch=3).at(123_456_789, 123_456_793).tolist() == GOLDEN_1E9


GOLDEN_10 = [9, 2, 7, 5, 1, 4, 3, 0, 8, 6]
GOLDEN_1E9 = [717833296, 87550486, 77224675, 172601157]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [
        tuple(EpochOrder(num_samples=50, seed=seed, epoch=epoch).at(0, 50))
        for seed in range(5)
        for epoch in range(5)
    ]
    assert len(set(orders)) == 25


def test_without_shuffle_the_order_is_sequential() -> None:
    assert EpochOrder(num_samples=9, seed=3, shuffle=False).at(2, 6).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("num_samples", [3, 4, 5])
def test_all_permutations_of_few_samples_are_equally_likely(num_samples: int) -> None:
    trials, kinds = 6000, math.factorial(num_samples)
    seen = Counter(
        tuple(EpochOrder(num_samples=num_samples, seed=seed).at(0, num_samples).tolist())
        for seed in range(trials)
    )
    expected = trials / kinds
    chi_square = sum((seen[p] - expected) ** 2 / expected for p in itertools.permutations(range(num_samples)))
    assert chi_square < kinds - 1 + 4 * math.sqrt(2 * (kinds - 1))


def test_shuffling_moves_samples_and_parts_neighbours_like_a_random_permutation() -> None:
    num_samples = 100_000
    order = EpochOrder(num_samples=num_samples, seed=1).at(0, num_samples)
    displacement = np.abs(order - np.arange(num_samples)).mean() / num_samples
    neighbours_kept = int((np.abs(np.diff(order)) == 1).sum())
    assert displacement == pytest.approx(1 / 3, abs=0.005)
    assert neighbours_kept < 12  # 2 expected, Poisson


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 40))
def test_rank_shares_follow_each_other_and_are_balanced(start: int, length: int, num_ranks: int) -> None:
    shares = [rank_share(start, start + length, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    assert shares[0].start == start
    assert shares[-1].stop == start + length
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))
    sizes = [share.num_samples for share in shares]
    assert max(sizes) - min(sizes) <= 1


def consumed(
    order: EpochOrder, *, batch: int, num_ranks: int, start: int, last: LastBatch, steps: int | None = None
) -> tuple[list[list[int]], int]:
    """Global batches as the ranks together see them, and the position after them."""
    batches, position = [], start
    for span in itertools.islice(batch_spans(order, batch=batch, last=last, start=start), steps):
        seen: list[int] = []
        for rank in range(num_ranks):
            share = rank_share(span.start, span.stop, rank=rank, num_ranks=num_ranks)
            seen += order.at(share.start, share.stop).tolist()
        batches.append(seen)
        position = span.stop
    return batches, position


@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 16), st.integers(1, 16), st.data())
def test_each_sample_once_over_an_interruption_on_any_ranks_with_any_batch(
    num_samples: int, batch: int, ranks_before: int, ranks_after: int, data: st.DataObject
) -> None:
    order = EpochOrder(num_samples=num_samples, seed=11, epoch=1)
    steps = data.draw(st.integers(0, -(-num_samples // batch)))
    other_batch = data.draw(st.sampled_from([batch, batch + 1, max(1, batch // 2)]))
    before, position = consumed(
        order, batch=batch, num_ranks=ranks_before, start=0, last=LastBatch.KEEP, steps=steps
    )
    after, end = consumed(
        order, batch=other_batch, num_ranks=ranks_after, start=position, last=LastBatch.KEEP
    )
    assert end == num_samples
    assert sorted(itertools.chain(*before, *after)) == list(range(num_samples))
    if other_batch == batch:
        alone, _ = consumed(order, batch=batch, num_ranks=1, start=0, last=LastBatch.KEEP)
        assert before + after == alone


def test_the_last_partial_batch_is_kept_or_dropped() -> None:
    order = EpochOrder(num_samples=10)
    assert [s.num_samples for s in batch_spans(order, batch=4, last=LastBatch.KEEP)] == [4, 4, 2]
    assert [s.num_samples for s in batch_spans(order, batch=4, last=LastBatch.DROP)] == [4, 4]
    assert num_batches(10, global_batch=4, last_batch=LastBatch.KEEP, start=8) == 1
    assert num_batches(10, global_batch=4, last_batch=LastBatch.KEEP, start=10) == 0
    assert num_batches(10, global_batch=4, last_batch=LastBatch.DROP, start=7) == 0


def test_a_span_outside_the_epoch_is_refused() -> None:
    with pytest.raises(DataError, match="positions 5 to 11 were requested from an epoch of 10 samples"):
        EpochOrder(num_samples=10).at(5, 11)
    with pytest.raises(RecipeError, match="seed -1"):
        EpochOrder(num_samples=10, seed=-1)
    with pytest.raises(DataError, match="rank 4 is not one of 4 ranks"):
        rank_share(0, 8, rank=4, num_ranks=4)
