"""Divides the time of a step into named parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Sums seconds by name, from one `lap` to the next.

    Names used by the training loop: `input` (waiting for a batch), `compute` (forward, backward, optimizer),
    `sync` (total time of the reduction, on any thread), `exposed_sync` (the part of it for which
    training was blocked), `checkpoint`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lap_started = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds the duration of the `with` block to `name`, even if the block raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, seconds=time.perf_counter() - started)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Excludes the duration of the `with` block from the step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._lap_started += time.perf_counter() - started

    def add(self, name: str, *, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Returns seconds by name since the last lap, with the total under `step`, and starts the next lap."""
        now = time.perf_counter()
        seconds = {"step": now - self._lap_started, **self._seconds}
        self._lap_started = now
        self._seconds = {}
        return seconds
