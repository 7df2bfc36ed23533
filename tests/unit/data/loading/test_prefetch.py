from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpctrain.data import Dataset, Loader, pack_arrays
from hpctrain.data.loading.prefetch import ByteBound, Prefetch


class Maker:
    """Items of given sizes, with a count of what exists and has not been taken."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.lock = threading.Lock()
        self.alive_bytes = 0
        self.peak_bytes = 0
        self.begun = 0

    def __call__(self, number: int) -> bytes:
        with self.lock:
            self.begun += 1
            self.alive_bytes += self.sizes[number]
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        return number.to_bytes(4, "big") + bytes(self.sizes[number] - 4)

    def taken(self, item: bytes) -> None:
        with self.lock:
            self.alive_bytes -= len(item)

    def begun_after(self, expected: int) -> int:
        """Items begun: waits for `expected`, then a little for one too many."""
        end = time.monotonic() + 300
        while self.begun < expected and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)
        return self.begun


def bound(max_bytes: int, *, expected_bytes: int | None = None, making_bytes: int = 0) -> ByteBound[bytes]:
    return ByteBound(
        max_bytes=max_bytes, num_bytes=len, expected_bytes=expected_bytes, making_bytes=making_bytes
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(4, 100), min_size=1, max_size=30),
    st.integers(1, 400),
    st.integers(1, 4),
    st.booleans(),
)
def test_items_come_in_order_and_take_no_more_than_the_bound(
    sizes: list[int], max_bytes: int, num_threads: int, sizes_known: bool
) -> None:
    make = Maker(sizes)
    limit = bound(max_bytes, expected_bytes=100 if sizes_known else None)
    with Prefetch(make, num_items=len(sizes), bound=limit, num_threads=num_threads) as items:
        for number, item in enumerate(items):
            assert int.from_bytes(item[:4], "big") == number
            assert len(item) == sizes[number]
            make.taken(item)
    assert make.begun == len(sizes)
    # One item is always allowed. Unknown sizes: those being made at once may each be larger than all before.
    growth = 0 if sizes_known else num_threads * (100 - 4)
    assert make.peak_bytes <= max(max_bytes, 100) + growth


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_ready_waits_for_the_consumer(num_threads: int) -> None:
    make = Maker([10] * 30)
    with Prefetch(make, num_items=30, bound=bound(45, expected_bytes=10), num_threads=num_threads) as items:
        for taken in range(5):
            assert make.begun_after(4 + taken) == 4 + taken
            next(items)


# Sizes of the items, arguments of Prefetch, and how many items are begun after how many were taken.
AHEAD: dict[str, tuple[list[int], dict[str, Any], dict[int, int]]] = {
    "the first of unknown size is made alone and tells the size of the next": (
        [40] * 20, {"bound": bound(100), "num_threads": 4}, {0: 2, 1: 3},  # 40 + 40; a third would not fit
    ),
    "items that grow leave room for fewer": (
        [10] * 10 + [50] * 10, {"bound": bound(100), "num_threads": 1}, {0: 10, 10: 12},
    ),
    "making_bytes count towards the bound only while an item is made": (
        # Two are ready: 20 and 35 for the next are more than 50.
        [10] * 20, {"bound": bound(50, expected_bytes=10, making_bytes=25), "num_threads": 2}, {0: 2, 1: 3},
    ),
    "no more than depth items are made ahead even if more bytes would fit": (
        [10] * 20, {"bound": bound(1000, expected_bytes=10), "depth": 3}, {0: 3, 1: 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AHEAD)
def test_so_many_items_are_made_ahead(case: str) -> None:
    sizes, options, begun = AHEAD[case]
    make, taken = Maker(sizes), 0
    with Prefetch(make, num_items=len(sizes), **options) as items:
        for number, expected in begun.items():
            for _ in range(number - taken):
                next(items)
            taken = number
            assert make.begun_after(expected) == expected


def test_a_transform_that_makes_batches_larger_is_held_to_the_bytes_of_its_output(tmp_path: object) -> None:
    directory = str(tmp_path)
    pack_arrays(directory, {"x": np.zeros((200, 16), np.float32), "label": np.arange(200)})
    made = []

    def grow(fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made.append(len(fields["x"]))
        return {"wide": np.repeat(fields["x"], 16, axis=1)}  # 1024 bytes per sample

    loader = Loader(
        Dataset.open(directory), global_batch=10, transform=grow, prefetch_bytes=52_000, num_threads=2
    )
    with loader.epoch(0) as batches:
        for taken in range(1, 6):
            next(batches)
            end = time.monotonic() + 300
            while len(made) - taken < 5 and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.02)
            assert len(made) - taken == 5  # 10 KB each, and 720 bytes of input while one is made


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_consumer_that_waits_makes_items_too_and_they_come_in_order(num_threads: int) -> None:
    makers: set[str] = set()

    def make(number: int) -> int:
        makers.add(threading.current_thread().name)
        time.sleep(0.002)
        return number

    with Prefetch(make, num_items=60, depth=4, num_threads=num_threads, help_make=True) as items:
        assert list(items) == list(range(60))
    assert threading.main_thread().name in makers
    assert len(makers) == num_threads + 1


def test_an_error_made_by_the_consumer_comes_where_its_item_would_have_come() -> None:
    def make(number: int) -> int:
        time.sleep(0.001)
        if number == 7:
            raise ValueError("item 7")
        return number

    with Prefetch(make, num_items=20, depth=4, help_make=True) as items:
        assert [next(items) for _ in range(7)] == list(range(7))
        with pytest.raises(ValueError, match="item 7"):
            next(items)


def test_an_interrupt_while_the_consumer_makes_an_item_ends_the_iterator() -> None:
    def make(number: int) -> int:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.05)
        return number

    items = Prefetch(make, num_items=20, depth=4, help_make=True)
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert list(items) == []
