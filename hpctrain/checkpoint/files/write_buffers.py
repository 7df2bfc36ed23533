"""Lends the writer's buffer to the code that joins small tensors, which saves a copy. One rank, one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

_Memory: TypeAlias = NDArray[np.uint8]
# (offset in the file, number of bytes) -> memory for the next bytes to be written, or None.
Lend: TypeAlias = Callable[[int, int], _Memory | None]


@final
class Staging:
    """Provides memory to join small tensors in: the writer's while one is active, else new memory."""

    def __init__(self) -> None:
        self._lend: Lend | None = None
        self._write_now: Callable[[], None] | None = None

    def memory_for(self, offset: int, num_bytes: int) -> _Memory:
        """Returns uninitialized memory for the file's bytes from `offset` on: uint8, shape (num_bytes,).

        Before the next call of `memory_for` or `write_now`, and before other bytes, the caller must pass all of it or
        nothing to the writer; afterwards it must not use it.
        """
        lent = None if self._lend is None else self._lend(offset, num_bytes)
        return np.empty(num_bytes, dtype=np.uint8) if lent is None else lent

    def write_now(self) -> None:
        """Makes the writer start writing the bytes it has collected, since none follow for a while. Raises OSError."""
        if self._write_now is not None:
            self._write_now()

    @contextmanager
    def lent(self, lend: Lend, *, write_now: Callable[[], None]) -> Iterator[None]:
        """Within the block, `memory_for` returns the writer's memory if `lend` provides it."""
        self._lend, self._write_now = lend, write_now
        try:
            yield
        finally:
            self._lend = self._write_now = None
