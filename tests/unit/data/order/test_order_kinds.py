"""What each kind of order promises: blocks, weighted, stratified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray

from hpctrain.data import (
    Dataset,
    Loader,
    Stratified,
    Weighted,
)
from hpctrain.data.order.order_spec import (
    BlockOrder,
    Strata,
    StratifiedOrder,
    WeightedOrder,
    cumulative_weights,
)
from hpctrain.data.order.permutation import Direction, epoch_key, permute
from hpctrain.errors import DataError
from tests.unit.data.order.order_cases import mixing


@given(st.integers(1, 2**62), st.integers(0, 2**32), st.integers(0, 2**62))
def test_a_permutation_can_be_turned_round(num_values: int, seed: int, first: int) -> None:
    values = np.unique((first + np.arange(50)) % num_values)
    key = epoch_key(seed, 1)
    moved = permute(values, num_values=num_values, key=key)
    back = permute(moved, num_values=num_values, key=key, direction=Direction.INVERSE)
    assert np.array_equal(back, values)


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(1, 70), st.integers(1, 9), st.integers(0, 100))
@example(num_samples=65, block=64, window=1, seed=0)
def test_a_window_of_the_epoch_holds_its_whole_blocks_and_nothing_else(
    num_samples: int, block: int, window: int, seed: int
) -> None:
    order = BlockOrder(num_samples=num_samples, block_samples=block, window_blocks=window, seed=seed)
    position = 0
    for number in range(order.num_windows):
        blocks = order.blocks_of(number)
        inside = np.concatenate([np.arange(*span) for span in blocks])
        assert len(blocks) == window or number == order.num_windows - 1
        assert order.windows_of(position, position + len(inside)) == range(number, number + 1)
        assert np.array_equal(np.sort(order.at(position, position + len(inside))), inside)
        position += len(inside)
    assert position == num_samples
    assert list(order.windows_of(0, num_samples)) == list(range(order.num_windows))


@pytest.mark.parametrize(("block", "window"), [(128, 4), (128, 16), (512, 16)])
def test_blocks_move_samples_as_far_as_a_full_shuffle_and_part_neighbours_within_the_window(
    block: int, window: int
) -> None:
    order = BlockOrder(num_samples=100_000, block_samples=block, window_blocks=window, seed=1)
    displacement, kept = mixing(order)
    blocks = 100_000 / block
    assert displacement == pytest.approx(1 / 3, abs=0.6 / np.sqrt(blocks))  # as of `blocks` random places
    # Two samples that follow each other are neighbours in the file with chance 2 / (samples of the window).
    expected = 2 / (block * window)
    assert kept == pytest.approx(expected, abs=5 * np.sqrt(expected / 100_000))


def test_a_batch_of_a_window_draws_from_many_of_its_blocks() -> None:
    order = BlockOrder(num_samples=2**15, block_samples=128, window_blocks=16, seed=3)
    batches = [order.at(first, first + 64) // 128 for first in range(0, 2**15, 64)]
    # 64 draws without replacement from 16 blocks of 128 miss one with chance (15/16)**64, about 0.015.
    assert np.mean([len(set(batch)) for batch in batches]) == pytest.approx(
        16 * (1 - (15 / 16) ** 64), abs=0.05
    )


def test_samples_are_drawn_as_often_as_their_weights_say_and_never_without() -> None:
    weights = np.array([0, 1, 2, 0, 5, 0.5, 0])
    order = WeightedOrder(sums=cumulative_weights(weights), num_samples=200_000, seed=2)
    drawn = np.bincount(order.at(0, 200_000), minlength=7)
    expected = weights / weights.sum() * 200_000
    assert (drawn[weights == 0] == 0).all()
    alive = weights > 0
    assert (((drawn - expected)[alive] ** 2) / expected[alive]).sum() < 3 + 4 * np.sqrt(6)


def test_an_epoch_of_draws_has_the_length_that_was_asked(datasets: dict[int, Dataset]) -> None:
    spec = Weighted(weights=np.arange(97), num_draws=250)
    loader = Loader(datasets[26], global_batch=100, order=spec)
    batches = list(loader.epoch(0))
    assert [batch.num_samples for batch in batches] == [100, 100, 50]
    assert loader.position == 250
    assert 0 not in torch.cat([batch["label"] for batch in batches])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.array([1.0, -2.0]), "the weight of sample 1 is -2.0"),
        (np.array([np.nan]), "the weight of sample 0 is nan"),
        (np.zeros(3), "add up to 0.0"),
        (np.ones((2, 2)), r"float64 of shape \(2, 2\)"),
        (np.array(["a"]), "one number per sample"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: NDArray[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Weighted(weights=weights)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.integers(1, 300),
    st.integers(0, 1000),
    st.data(),
)
def test_any_stretch_of_a_stratified_epoch_has_the_datasets_proportions(
    counts: list[int], length: int, seed: int, data: st.DataObject
) -> None:
    classes = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    total = len(classes)
    length = min(length, total)
    start = data.draw(st.integers(0, total - length))
    order = StratifiedOrder(strata=Strata.of(classes), seed=seed, epoch=1)
    drawn = np.bincount(classes[order.at(start, start + length)], minlength=len(counts))
    due = length * np.array(counts) / total
    assert (np.abs(drawn - due) <= 1 + len(counts) * np.array(counts) / total).all()


def test_the_members_of_a_class_are_shuffled_each_by_itself() -> None:
    classes = np.arange(40_000) % 4
    order = StratifiedOrder(strata=Strata.of(classes), seed=5)
    displacement, kept = mixing(order)
    assert displacement == pytest.approx(1 / 3, abs=0.01)
    assert kept < 0.001
    found = order.at(0, 40_000)
    ranks_in_class = [found[classes[found] == c] // 4 for c in range(4)]
    assert len({tuple(ranks[:10]) for ranks in ranks_in_class}) == 4


def test_strata_that_are_no_classes_are_refused() -> None:
    for classes in (np.zeros(3), np.zeros((2, 2), int), np.zeros(0, int)):
        with pytest.raises(DataError, match="one integer per sample is needed"):
            Stratified(classes=classes)
