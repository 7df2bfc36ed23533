"""Every order: what is where, how well it mixes, and that it is the same for any ranks and any interruption."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray

from hpctrain.data import (
    Batch,
    Blocks,
    Dataset,
    FieldSpec,
    Fixed,
    LastBatch,
    Loader,
    OrderSpec,
    Sequential,
    Shuffled,
    Stratified,
    Weighted,
    pack_arrays,
)
from hpctrain.data.order.batch_plan import plan_batch
from hpctrain.data.order.block_shuffle import BlockOrder
from hpctrain.data.order.epoch_order import EpochOrder, Order, batch_spans, rank_share
from hpctrain.data.order.permutation import Direction, epoch_key, permute
from hpctrain.data.order.stratified import Strata, StratifiedOrder
from hpctrain.data.order.weighted import WeightedOrder, cumulative_weights
from hpctrain.errors import DataError, RecipeError

KINDS = ("shuffle", "sequential", "blocks", "stratified", "weighted", "fixed")
ONCE = tuple(kind for kind in KINDS if kind != "weighted")  # every sample exactly once per epoch


def spec_of(kind: str, num_samples: int, *, block: int = 7, window: int = 3) -> OrderSpec:
    """An order of each kind; weights and classes are odd functions of the sample."""
    numbers = np.arange(num_samples)
    return {
        "shuffle": Shuffled(),
        "sequential": Sequential(),
        "blocks": Blocks(block_samples=block, window_blocks=window),
        "stratified": Stratified(classes=numbers * 7919 % 11 // 3),
        "weighted": Weighted(weights=(numbers + 1) % 4 + 0.25),
        "fixed": Fixed(of=Shuffled()),
    }[kind]


def global_batches(
    order: Order, *, batch: int, num_ranks: int, start: int = 0, last: LastBatch, steps: int | None = None
) -> tuple[list[list[int]], list[list[int]], int]:
    """Of each global batch the samples that count and those that fill it, and the position after them."""
    real, padded, position = [], [], start
    spans = batch_spans(order.num_samples, global_batch=batch, last_batch=last, start=start)
    for span in itertools.islice(spans, steps):
        plans = [
            plan_batch(order, span=span, global_batch=batch, last_batch=last, rank=rank, num_ranks=num_ranks)
            for rank in range(num_ranks)
        ]
        sizes = [len(plan.indices) for plan in plans]
        assert max(sizes) - min(sizes) <= 1
        real.append([int(i) for plan in plans for i in plan.indices[: plan.num_samples]])
        padded.append([int(i) for plan in plans for i in plan.indices[plan.num_samples :]])
        position = span.stop
    return real, padded, position


@settings(max_examples=100)
@given(
    st.sampled_from(KINDS), st.integers(1, 300), st.integers(1, 48), st.integers(1, 16), st.integers(1, 16),
    st.sampled_from(list(LastBatch)), st.integers(1, 40), st.integers(1, 6), st.data(),
)  # fmt: skip
def test_any_interruption_on_any_ranks_leaves_the_global_batches_as_they_were(
    kind: str, num_samples: int, batch: int, ranks_before: int, ranks_after: int, last: LastBatch, block: int,
    window: int, data: st.DataObject,
) -> None:  # fmt: skip
    spec = spec_of(kind, num_samples, block=block, window=window)
    order = spec.for_epoch(2, num_samples=num_samples, seed=11)
    alone, alone_padded, end = global_batches(order, batch=batch, num_ranks=1, last=last)
    steps = data.draw(st.integers(0, len(alone)))
    before, padded_before, position = global_batches(
        order, batch=batch, num_ranks=ranks_before, last=last, steps=steps
    )
    after, padded_after, reached = global_batches(
        order, batch=batch, num_ranks=ranks_after, last=last, start=position
    )
    assert before + after == alone
    assert padded_before + padded_after == alone_padded
    assert max(end, position) == max(reached, position)
    seen = list(itertools.chain(*alone))
    assert seen == order.at(0, len(seen)).tolist()
    if last is LastBatch.DROP:
        assert len(seen) == num_samples - num_samples % batch
        assert kind == "weighted" or len(set(seen)) == len(seen)
    elif kind in ONCE:
        assert sorted(seen) == list(range(num_samples))
    if last is LastBatch.PAD:
        assert all(len(r) + len(p) == batch for r, p in zip(alone, alone_padded, strict=True))
        assert all(
            p == list(itertools.islice(itertools.cycle(r), len(p)))
            for r, p in zip(alone, alone_padded, strict=True)
        )
    else:
        assert not any(alone_padded)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Dataset]:
    """The same 97 numbers in 1, 4 and 14 shards."""
    opened = {}
    for shard_samples in (97, 26, 7):
        directory = tmp_path_factory.mktemp("data")
        pack_arrays(directory, {"label": np.arange(97)}, shard_samples=shard_samples)
        opened[shard_samples] = Dataset.open(directory)
    return opened


@settings(max_examples=25)
@given(
    st.sampled_from(KINDS), st.sampled_from([97, 26, 7]), st.integers(16, 40), st.integers(1, 16),
    st.integers(1, 16), st.sampled_from(list(LastBatch)), st.data(),
)  # fmt: skip
def test_files_and_ranks_before_and_after_an_interruption_do_not_change_what_is_read(
    datasets: dict[int, Dataset], kind: str, shard: int, batch: int, before: int, after: int,
    last: LastBatch, data: st.DataObject,
) -> None:  # fmt: skip
    spec = spec_of(kind, 97)

    def loader(rank: int, num_ranks: int, *, seed: int) -> Loader:
        return Loader(
            datasets[shard],
            global_batch=batch,
            rank=rank,
            num_ranks=num_ranks,
            seed=seed,
            order=spec,
            last_batch=last,
        )

    count = loader(0, 1, seed=5).batches_per_epoch
    steps = data.draw(st.integers(0, count - 1))
    seen: list[list[int]] = [[] for _ in range(count)]
    states = []
    for rank in range(before):
        mine = loader(rank, before, seed=5)
        with mine.epoch(1) as batches:
            for number, part in enumerate(itertools.islice(batches, steps)):
                seen[number] += part.real()["label"].tolist()
        states.append(json.loads(json.dumps(mine.state_dict())))
    assert all(state == states[0] for state in states)
    for rank in range(after):
        mine = loader(rank, after, seed=0)
        mine.load_state_dict(states[0])
        for number, part in enumerate(mine):
            assert part.epoch == 1
            seen[steps + number] += part.real()["label"].tolist()
    order = spec.for_epoch(1, num_samples=97, seed=5)
    expected = order.at(0, 97 - 97 % batch if last is LastBatch.DROP else 97)
    assert [sample for part in seen for sample in part] == expected.tolist()


def test_each_order_holds_each_sample_once_for_every_small_number_of_samples() -> None:
    for num_samples in [*range(1, 30), 97, 256, 1000]:
        for kind in ONCE:
            for block, window in ((1, 1), (3, 2), (64, 5)) if kind == "blocks" else ((1, 1),):
                spec = spec_of(kind, num_samples, block=block, window=window)
                order = spec.for_epoch(4, num_samples=num_samples, seed=7)
                whole = order.at(0, num_samples)
                assert np.array_equal(np.sort(whole), np.arange(num_samples)), (kind, num_samples, block)
                third = num_samples // 3
                assert np.array_equal(order.at(third, 2 * third), whole[third : 2 * third])


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_and_seeds_give_other_orders_but_where_the_order_is_fixed(kind: str) -> None:
    spec = spec_of(kind, 60)
    orders = {
        tuple(spec.for_epoch(epoch, num_samples=60, seed=seed).at(0, 60))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == (1 if kind in ("sequential", "fixed") else 9)


def test_the_orders_stay_what_they_are() -> None:
    """A checkpoint holds a place in them: if one must change, change its name too."""
    blocks = BlockOrder(num_samples=10**9, block_samples=341, window_blocks=16, seed=42, epoch=3)
    weighted = WeightedOrder(sums=cumulative_weights(np.arange(1000)), num_samples=1000, seed=42, epoch=3)
    stratified = StratifiedOrder(strata=Strata.of(np.arange(1000) % 7), seed=42, epoch=3)
    assert blocks.at(123_456_789, 123_456_793).tolist() == GOLDEN_BLOCKS
    assert weighted.at(500, 506).tolist() == GOLDEN_WEIGHTED
    assert stratified.at(500, 506).tolist() == GOLDEN_STRATIFIED
    assert {kind: spec_of(kind, 10).name for kind in KINDS} == GOLDEN_NAMES


GOLDEN_BLOCKS = [561394445, 318206679, 102418530, 102418510]
GOLDEN_WEIGHTED = [556, 487, 926, 655, 749, 377]
GOLDEN_STRATIFIED = [594, 354, 352, 103, 717, 36]
GOLDEN_NAMES = {
    "shuffle": "feistel-1",
    "sequential": "sequential-1",
    "blocks": "blocks-1 of 7 samples within 3",
    "stratified": "stratified-1 by 41f1ddc968f588e0",
    "weighted": "weighted-1 by f9d7ebc73aafe3b4",
    "fixed": "fixed feistel-1",
}


@given(st.integers(1, 2**62), st.integers(0, 2**32), st.integers(0, 2**62))
def test_a_permutation_can_be_turned_round(num_values: int, seed: int, first: int) -> None:
    values = np.unique((first + np.arange(50)) % num_values)
    key = epoch_key(seed, 1)
    moved = permute(values, num_values=num_values, key=key)
    back = permute(moved, num_values=num_values, key=key, direction=Direction.INVERSE)
    assert np.array_equal(back, values)


# ------------------------------------------------------------------ blocks


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


def mixing(order: Order) -> tuple[float, float]:
    """Mean displacement as a share of the epoch, and the share of neighbours in the files kept side by side."""
    found = order.at(0, order.num_samples)
    displacement = float(np.abs(found - np.arange(order.num_samples)).mean()) / order.num_samples
    return displacement, float((np.abs(np.diff(found)) == 1).mean())


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


# ------------------------------------------------------------------ weighted


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


# ------------------------------------------------------------------ stratified


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


# ------------------------------------------------------------------ the last batch, padded


def test_means_over_a_padded_batch_count_each_sample_once(datasets: dict[int, Dataset]) -> None:
    for num_ranks, parts in ((1, 1), (3, 2), (7, 4)):
        totals = [0.0] * 5
        for rank in range(num_ranks):
            loader = Loader(
                datasets[26], global_batch=21, rank=rank, num_ranks=num_ranks, last_batch="pad", shuffle=False
            )
            for number, batch in enumerate(loader.epoch(0)):
                assert len(batch["label"]) in (21 // num_ranks, 21 // num_ranks + (21 % num_ranks > 0))
                assert int(batch.valid.sum()) == batch.num_samples
                for part in batch.split(parts):
                    if part.num_samples:
                        masked = part["label"].double()[part.valid].mean()
                        assert masked == part.real()["label"].double().mean()
                        totals[number] += part.weight * float(masked)
            assert loader.position == 97
        assert totals == pytest.approx([np.arange(k, min(k + 21, 97)).mean() for k in range(0, 97, 21)])


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9))
def test_micro_batches_of_a_padded_batch_make_it_up_again(real: int, padded: int, parts: int) -> None:
    fields = {"x": torch.arange(real + padded)}
    batch = Batch(fields=fields, epoch=0, start=0, num_samples=real, num_padded=padded, global_samples=99)
    split = batch.split(parts)
    assert torch.equal(torch.cat([part["x"] for part in split]), fields["x"])
    assert torch.equal(torch.cat([part.valid for part in split]), batch.valid)
    assert sum(part.num_samples for part in split) == real
    assert torch.equal(batch.real()["x"], fields["x"][:real])


# ------------------------------------------------------------------ places


def test_a_place_is_refused_by_another_order_and_by_other_data(datasets: dict[int, Dataset]) -> None:
    state = Loader(datasets[26], global_batch=8, seed=3, order=Blocks(block_samples=4)).state_dict()
    with pytest.raises(
        DataError, match=r"saved with order 'blocks-1 of 4 samples within 64'.*has 'feistel-1'"
    ):
        Loader(datasets[26], global_batch=8).load_state_dict(state)
    with pytest.raises(DataError, match="saved with 97 samples, this dataset has 5"):
        Loader(Numbers(5), global_batch=5, order=Blocks(block_samples=4)).load_state_dict(state)
    for broken in ({}, {**state, "seed": "3"}, {**state, "position": -1}, {**state, "epoch": True}):
        with pytest.raises(DataError, match="this is not a state of a loader"):
            Loader(datasets[26], global_batch=8).load_state_dict(broken)
    other = Loader(datasets[26], global_batch=8, order=Weighted(weights=np.ones(97)))
    with pytest.raises(DataError, match="a position is another sample in another order"):
        other.load_state_dict(
            Loader(datasets[26], global_batch=8, order=Weighted(weights=np.arange(97))).state_dict()
        )


def test_a_place_at_the_end_of_an_epoch_goes_on_with_the_next(datasets: dict[int, Dataset]) -> None:
    loader = Loader(datasets[26], global_batch=50, last_batch="drop", seed=2)
    assert len(list(loader.epoch(3))) == 1
    again = Loader(datasets[26], global_batch=50, last_batch="drop")
    again.load_state_dict(loader.state_dict())
    (batch,) = list(again)
    assert (batch.epoch, batch.start) == (4, 0)
    assert batch["label"].tolist() == EpochOrder(num_samples=97, seed=2, epoch=4).at(0, 50).tolist()


def test_what_an_order_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError, match="blocks of 0 samples, mixed within 4"):
        BlockOrder(num_samples=10, block_samples=0, window_blocks=4)
    with pytest.raises(DataError, match="there are 3 weights for a dataset of 97 samples"):
        Weighted(weights=np.ones(3)).for_epoch(0, num_samples=97, seed=0)
    with pytest.raises(DataError, match="there are 3 strata for a dataset of 5 samples"):
        Loader(Numbers(5), global_batch=5, order=Stratified(classes=np.arange(3)))
    for kind in KINDS:
        with pytest.raises(DataError, match="positions 5 to 11 were requested from an epoch of 10 samples"):
            spec_of(kind, 10).for_epoch(0, num_samples=10, seed=0).at(5, 11)


class Numbers:
    """Samples that are their own index, and are nowhere."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.fields = {"number": FieldSpec(dtype="int64", shape=(1,))}

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        array = indices[:, None]
        if out is not None:
            out["number"][...] = array
        return {"number": array}


# ------------------------------------------------------------------ figure 3 of the plan: 10^9 samples, 65,536 ranks


@pytest.mark.parametrize("kind", ["shuffle", "blocks", "sequential"])
def test_an_order_of_a_billion_samples_on_65536_ranks_takes_under_a_megabyte_a_batch(kind: str) -> None:
    num_samples, num_ranks = 10**9, 65_536
    spec: Any = Blocks(block_samples=341) if kind == "blocks" else spec_of(kind, 1)
    span = rank_share(77 * 2**21, 78 * 2**21, rank=4000, num_ranks=num_ranks)
    spec.for_epoch(0, num_samples=num_samples, seed=1).at(*span)  # what numpy keeps from a first call
    tracemalloc.start()
    try:
        order = spec.for_epoch(1, num_samples=num_samples, seed=1)
        for step in range(20):
            found = order.at(span.start + step, span.stop + step)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 32
    assert peak < 1 << 20
