"""Every order: what is where, how well it mixes, and that it is the same for any ranks and any interruption."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpctrain.data import (
    Batch,
    Blocks,
    Dataset,
    LastBatch,
    Loader,
    Stratified,
    Weighted,
)
from hpctrain.data.order.epoch_order import EpochOrder, Order, plan_batch, rank_share
from hpctrain.data.order.order_spec import (
    BlockOrder,
    Strata,
    StratifiedOrder,
    WeightedOrder,
    cumulative_weights,
)
from hpctrain.errors import DataError, RecipeError
from tests.unit.data.order.order_cases import KINDS, ONCE, Numbers, batch_spans, spec_of


def global_batches(
    order: Order, *, batch: int, num_ranks: int, start: int = 0, last: LastBatch, steps: int | None = None
) -> tuple[list[list[int]], list[list[int]], int]:
    """Of each global batch the samples that count and those that fill it, and the position after them."""
    real, padded, position = [], [], start
    spans = batch_spans(order, batch=batch, last=last, start=start)
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
    with pytest.raises(DataError, match="in which the same position means another sample"):
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
