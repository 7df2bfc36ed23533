from __future__ import annotations

import threading
import time

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


def test_the_first_of_unknown_size_is_made_alone_and_tells_the_size_of_the_next() -> None:
    make = Maker([40] * 20)
    with Prefetch(make, num_items=20, bound=bound(100), num_threads=4) as items:
        assert make.begun_after(2) == 2  # 40 + 40; a third would not fit
        next(items)
        assert make.begun_after(3) == 3


def test_items_that_grow_leave_room_for_fewer() -> None:
    make = Maker([10] * 10 + [50] * 10)
    with Prefetch(make, num_items=20, bound=bound(100), num_threads=1) as items:
        assert make.begun_after(10) == 10
        for _ in range(10):
            next(items)
        assert make.begun_after(12) == 12


def test_making_bytes_count_towards_the_bound_only_while_an_item_is_made() -> None:
    make = Maker([10] * 20)
    limit = bound(50, expected_bytes=10, making_bytes=25)
    with Prefetch(make, num_items=20, bound=limit, num_threads=2) as items:
        assert make.begun_after(2) == 2  # two are ready: 20 and 35 for the next are more than 50
        next(items)
        assert make.begun_after(3) == 3


def test_no_more_than_depth_items_are_made_ahead_even_if_more_bytes_would_fit() -> None:
    make = Maker([10] * 20)
    with Prefetch(make, num_items=20, depth=3, bound=bound(1000, expected_bytes=10)) as items:
        assert make.begun_after(3) == 3
        next(items)
        assert make.begun_after(4) == 4


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
