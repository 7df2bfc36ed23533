"""Makes items ahead of their consumer in threads: in order, bounded in number and in bytes.

Threads, not processes: forked workers under MPI hang or corrupt data (pytorch#13787, horovod#2898), and gathering
from a memory map releases the interpreter lock for most of the time. Python code that holds the lock runs in
separate processes (`hpctrain.data.transforms.worker_pool`), for which each of these threads waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# A thread that makes an item which nobody needs is waited for so long: it may hang.
_ENDING_MAY_TAKE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteBound(Generic[T]):
    """Bound on the bytes of the items that are ready or being made; one item is always allowed.

    max_bytes: the bound.
    num_bytes: returns the bytes of a finished item.
    expected_bytes: upper bound on the size of an item; None if it is unknown before one is made. Then the first
    is made alone, and each later one is expected to be as large as the largest so far.
    making_bytes: additional bytes while an item is being made, such as the input of a transform.

    If an item is larger than all before it, items already being made may exceed the bound by the difference;
    no other item is begun until it fits again.
    """

    max_bytes: int
    num_bytes: Callable[[T], int]
    expected_bytes: int | None = None
    making_bytes: int = 0


class _Shared(Generic[T]):
    """State shared by the consumer and its threads. It has no reference to the consumer, which can be collected."""

    def __init__(
        self, make: Callable[[int], T], *, num_items: int, depth: int | None, bound: ByteBound[T] | None
    ) -> None:
        self.make = make
        self.num_items = num_items
        self.condition = threading.Condition()
        self.depth = num_items if depth is None else max(1, depth)
        self.bound = bound
        self.largest_bytes = bound.expected_bytes if bound is not None else 0  # None: still unknown
        self.held_bytes: dict[int, int] = {}  # item -> bytes, from when it is begun until it is taken
        self.total_bytes = 0  # sum of held_bytes
        self.next_item = 0
        self.ready: dict[int, T | BaseException] = {}
        self.stopped = False

    def _reserve_bytes(self) -> int:
        """Returns the bytes to reserve for the next item while it is made."""
        if self.bound is None:
            return 0
        return self.bound.making_bytes + (self.largest_bytes or 0)

    def _fits(self) -> bool:
        if not self.held_bytes:
            return True
        if len(self.held_bytes) >= self.depth or self.largest_bytes is None:
            return False
        if self.bound is None:
            return True
        return self.total_bytes + self._reserve_bytes() <= self.bound.max_bytes

    def _hold(self, number: int, num_bytes: int) -> None:
        self.total_bytes += num_bytes - self.held_bytes.get(number, 0)
        self.held_bytes[number] = num_bytes

    def claim(self) -> int | None:
        """Waits until the next item fits the bound, then returns its number; None if no items remain or stopped."""
        with self.condition:
            while not self.stopped and self.next_item < self.num_items and not self._fits():
                self.condition.wait()
            return self._claim_now()

    def _claim_now(self) -> int | None:
        """Returns the next number if its item fits the bound now, else None. Call it with the lock held."""
        if self.stopped or self.next_item >= self.num_items or not self._fits():
            return None
        self._hold(self.next_item, self._reserve_bytes())
        self.next_item += 1
        return self.next_item - 1

    def put(self, number: int, item: T | BaseException) -> None:
        """Stores item `number`, or the error that was raised instead, for `take`."""
        num_bytes = 0
        if self.bound is not None and not isinstance(item, BaseException):
            num_bytes = self.bound.num_bytes(item)
        with self.condition:
            if not self.stopped:
                self.ready[number] = item
                self._hold(number, num_bytes)
                self.largest_bytes = max(self.largest_bytes or 0, num_bytes)
            self.condition.notify_all()

    def take(self, number: int, *, help_make: bool) -> T | BaseException:
        """Waits for item `number` and returns it. help_make: this thread makes items while it waits.

        Raises StopIteration after `stop`.
        """
        while True:
            with self.condition:
                if number in self.ready:
                    self.total_bytes -= self.held_bytes.pop(number)
                    self.condition.notify_all()
                    return self.ready.pop(number)
                if self.stopped:
                    raise StopIteration
                claimed = self._claim_now() if help_make else None
                if claimed is None:
                    self.condition.wait()
                    continue
            try:
                item: T | BaseException = self.make(claimed)
            except Exception as error:  # raised later, in place of item `claimed`
                item = error
            except BaseException:  # Ctrl-C is raised now
                self.stop()
                raise
            self.put(claimed, item)
            del item  # an error refers to this frame: the cycle would keep everything here alive

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            self.ready.clear()
            self.condition.notify_all()


def _work(shared: _Shared[T]) -> None:
    while (number := shared.claim()) is not None:
        try:
            item: T | BaseException = shared.make(number)
        except BaseException as error:  # passed to the consumer, which waits for this number
            item = error
        shared.put(number, item)
        del item


class MakingThreads:
    """The threads of a `Prefetch`, to which this has no reference."""

    def __init__(self, shared: _Shared[Any], threads: list[threading.Thread]) -> None:
        self._shared = shared
        self._threads = threads

    @property
    def have_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def unfinished(self) -> list[threading.Thread]:
        """Returns the threads that are still making an item although the iteration has ended."""
        return [thread for thread in self._threads if self._shared.stopped and thread.is_alive()]


def _end(shared: _Shared[T], threads: list[threading.Thread]) -> None:
    """Stops the threads and waits for them, for up to `_ENDING_MAY_TAKE_S`."""
    shared.stop()
    # The garbage collector may run in one of the threads, which cannot join itself.
    if threading.current_thread() not in threads:
        until_s = time.monotonic() + _ENDING_MAY_TAKE_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))


class Prefetch(Generic[T]):
    """Iterator over make(0), ..., make(num_items - 1), made ahead by threads.

    At most `depth` items are ready or being made at any time, within `bound`. An exception of `make` is raised in
    place of its item and ends the iteration. `close()` (also called at the end of a `with` block, and when the
    iterator is collected) stops the threads and waits a moment for them. help_make: a waiting consumer makes items
    itself, which uses one more core and saves passing items between threads.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        *,
        num_items: int,
        depth: int | None = None,
        bound: ByteBound[T] | None = None,
        num_threads: int = 1,
        help_make: bool = False,
    ) -> None:
        self.wait_s = 0.0
        self._next = 0
        self._help_make = help_make
        self._shared = _Shared(make, num_items=num_items, depth=depth, bound=bound)
        self._threads = [
            threading.Thread(target=_work, args=(self._shared,), name=f"hpctrain-data-{number}", daemon=True)
            for number in range(min(max(1, num_threads), num_items))
        ]
        self.threads = MakingThreads(self._shared, self._threads)
        # Runs once: on close(), when this iterator is collected, or before the interpreter shuts down (later
        # a daemon thread could be frozen while it holds the lock).
        self._finalizer = weakref.finalize(self, _end, self._shared, self._threads)
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._next >= self._shared.num_items or self._shared.stopped:
            self.close()
            raise StopIteration
        begin = time.perf_counter()
        item = self._shared.take(self._next, help_make=self._help_make)
        self.wait_s += time.perf_counter() - begin
        self._next += 1
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Stops the threads and waits a moment for them (`threads.unfinished`). May be called more than once."""
        self._finalizer()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InStep(Generic[T]):
    """Iterator over make(0), make(1), ...; the interface of `Prefetch`, without its threads."""

    def __init__(self, make: Callable[[int], T], *, num_items: int) -> None:
        self.wait_s = 0.0
        self._make = make
        self._num_items = num_items
        self._next = 0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._next >= self._num_items:
            raise StopIteration
        began = time.perf_counter()
        try:
            item = self._make(self._next)
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_s += time.perf_counter() - began
        self._next += 1
        return item

    def close(self) -> None:
        """Ends the iteration."""
        self._num_items = 0
