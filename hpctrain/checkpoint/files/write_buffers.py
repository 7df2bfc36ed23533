"""Between what joins small tensors and what writes them, of one rank, in one thread.

They are joined in the writer's own memory where it has some, so that their bytes are not copied twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

_Memory: TypeAlias = NDArray[np.uint8]
# (offset in the file, number of bytes) -> memory for what is handed over next, or None.
Lend: TypeAlias = Callable[[int, int], _Memory | None]


@final
class Staging:
    """Knows the writer while one is at work."""

    def __init__(self) -> None:
        self._lend: Lend | None = None
        self._write_now: Callable[[], None] | None = None

    def memory_for(self, offset: int, num_bytes: int) -> _Memory:
        """Memory for the file's bytes from `offset` on, shape (num_bytes,), not set; new each time, or the writer's.

        All of it, or nothing, is handed to the writer before anything else is, before more is asked for, and before
        `write_now`; afterwards it is not looked at again.
        """
        lent = None if self._lend is None else self._lend(offset, num_bytes)
        return np.empty(num_bytes, dtype=np.uint8) if lent is None else lent

    def write_now(self) -> None:
        """Nothing follows for a while: what the writer has gathered need not wait. Raises OSError."""
        if self._write_now is not None:
            self._write_now()

    @contextmanager
    def lent(self, lend: Lend, *, write_now: Callable[[], None]) -> Iterator[None]:
        """While the block runs, memory is the writer's where `lend` gives some."""
        self._lend, self._write_now = lend, write_now
        try:
            yield
        finally:
            self._lend = self._write_now = None
