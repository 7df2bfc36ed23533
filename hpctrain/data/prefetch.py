"""Makes items ahead of their consumer in threads: in order, at most `depth` of them at a time.

Threads, not processes: forked workers under MPI hang or corrupt (pytorch#13787, horovod#2898), and gathering
from a memory map releases the interpreter lock for most of its time.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Shared(Generic[T]):
    """What the consumer and its threads share. It does not know the consumer, which can so be collected."""

    def __init__(self, make: Callable[[int], T], *, num_items: int, depth: int) -> None:
        self.make = make
        self.num_items = num_items
        self.condition = threading.Condition()
        self.free = depth  # items that may still be begun
        self.next_item = 0
        self.ready: dict[int, T | BaseException] = {}
        self.stopped = False

    def claim(self) -> int | None:
        """Wait for room, then take the next number: each number taken has room, none waits for another."""
        with self.condition:
            while not self.stopped and self.next_item < self.num_items and self.free == 0:
                self.condition.wait()
            if self.stopped or self.next_item >= self.num_items:
                return None
            self.free -= 1
            self.next_item += 1
            return self.next_item - 1

    def put(self, number: int, item: T | BaseException) -> None:
        with self.condition:
            if not self.stopped:
                self.ready[number] = item
            self.condition.notify_all()

    def take(self, number: int) -> T | BaseException:
        with self.condition:
            while number not in self.ready:
                self.condition.wait()
            self.free += 1
            self.condition.notify_all()
            return self.ready.pop(number)

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            self.ready.clear()
            self.condition.notify_all()


def _work(shared: _Shared[T]) -> None:
    while (number := shared.claim()) is not None:
        try:
            item: T | BaseException = shared.make(number)
        except BaseException as error:  # everything goes to the consumer, which waits for this number
            item = error
        shared.put(number, item)
        del item


def _end(shared: _Shared[T], threads: list[threading.Thread]) -> None:
    """Stop the threads and wait for them."""
    shared.stop()
    # The garbage collector may run in one of them: it can only tell the others to stop.
    if threading.current_thread() not in threads:
        for thread in threads:
            thread.join()


class Prefetch(Generic[T]):
    """Iterator over make(0), ..., make(num_items - 1), made ahead by threads.

    At most `depth` items exist that the consumer has not taken yet, half-made ones included. An exception
    of `make` is raised where its item would have come; nothing comes after it. `close()` (also at the end of
    a `with` block, and when the iterator is collected) stops the threads and waits for them.
    """

    def __init__(self, make: Callable[[int], T], *, num_items: int, depth: int, num_threads: int = 1) -> None:
        self.wait_s = 0.0
        self._next = 0
        self._shared = _Shared(make, num_items=num_items, depth=max(1, depth))
        self._threads = [
            threading.Thread(target=_work, args=(self._shared,), name=f"hpctrain-data-{number}", daemon=True)
            for number in range(min(max(1, num_threads), num_items))
        ]
        # Runs once: on close(), when this iterator is collected, or before the interpreter shuts down (later
        # a thread could be frozen with the lock in its hands).
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
        item = self._shared.take(self._next)
        self.wait_s += time.perf_counter() - begin
        self._next += 1
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Stop and join the threads. May be called again."""
        self._finalizer()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
