"""Batches made when they are asked for, in the asking thread: for datasets that all ranks read together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


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
        """Nothing comes any more."""
        self._num_items = 0
