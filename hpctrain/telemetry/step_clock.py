"""Where the time of one step went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Adds up seconds under names, from one `lap` to the next.

    Names used by the training loop: `input` (waiting for a batch), `compute` (forward, backward, optimizer),
    `sync` (all the time the reduction took, on whatever thread), `exposed_sync` (the part of it for which
    training stood still), `checkpoint`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lap_started = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the duration of the `with` block to `name`, also when the block raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, seconds=time.perf_counter() - started)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """The duration of the `with` block belongs to no step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._lap_started += time.perf_counter() - started

    def add(self, name: str, *, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Seconds by name since the last lap, with `step` the whole of it; starts the next lap."""
        now = time.perf_counter()
        seconds = {"step": now - self._lap_started, **self._seconds}
        self._lap_started = now
        self._seconds = {}
        return seconds
