"""Memory of batches that is used again, and orders evaluated ahead, change nothing that can be seen."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpctrain.data import Dataset, EpochOrder, Loader, pack_arrays
from hpctrain.data.loading.batch import BatchMemory
from hpctrain.data.order.epoch_order import OrderAhead, ahead_for
from hpctrain.errors import DataError


def test_memory_is_used_again_only_when_no_view_of_the_batch_is_left() -> None:
    memory = BatchMemory(kept_bytes=1 << 20)
    first = memory.empty((50, 1000), dtype=np.dtype(np.float32))
    place = first.data_ptr()
    row, array = first[3], first.numpy()
    del first
    gc.collect()
    assert memory.empty((50, 1000), dtype=np.dtype(np.float32)).data_ptr() != place
    del row
    assert memory.empty((50, 1000), dtype=np.dtype(np.float32)).data_ptr() != place
    del array
    gc.collect()
    again = memory.empty((25, 2000), dtype=np.dtype(np.int32))
    assert again.data_ptr() == place
    assert again.dtype == torch.int32


def test_unused_memory_beyond_what_is_kept_is_freed() -> None:
    memory = BatchMemory(kept_bytes=200_000)
    batches = [memory.empty((100_000,), dtype=np.dtype(np.uint8)) for _ in range(5)]
    del batches
    gc.collect()
    assert [len(unused) for unused in memory._unused.values()] == [2]


def test_batches_that_are_kept_hold_what_they_held(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, (300, 9000), dtype=np.uint8)
    pack_arrays(tmp_path, {"x": values, "label": np.arange(300)}, shard_samples=70)
    for io in ("map", "read"):
        loader = Loader(Dataset.open(tmp_path, io=io), global_batch=16, num_threads=2, prefetch_bytes=500_000)
        kept = []
        for epoch in range(2):
            for number, batch in enumerate(loader.epoch(epoch)):
                if number % 3 == 0:
                    kept.append((batch["x"][1:], batch["label"][1:].numpy()))
        for x, label in kept:
            assert np.array_equal(x.numpy(), values[label])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9000),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 3000)), min_size=1, max_size=8),
)
def test_an_order_evaluated_ahead_is_the_order(num_samples: int, spans: list[tuple[int, int]]) -> None:
    order = EpochOrder(num_samples=num_samples, seed=3, epoch=5)
    ahead = OrderAhead(order)
    assert (ahead.num_samples, ahead.epoch) == (num_samples, 5)
    for start, length in spans:
        start, stop = min(start, num_samples), min(start + length, num_samples)
        found = ahead.at(start, stop)
        assert np.array_equal(found, order.at(start, stop))
        found += 1  # what is handed out is the caller's


def test_a_span_outside_the_epoch_is_refused_ahead_too() -> None:
    order = ahead_for(EpochOrder(num_samples=100, seed=0, epoch=0), num_ranks=1)
    assert isinstance(order, OrderAhead)
    with pytest.raises(DataError):
        order.at(90, 101)
