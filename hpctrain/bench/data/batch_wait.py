"""Measures how long a training step waits for its batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWait:
    """Wait for batches, in seconds: `waits_s` for each step after the first, `first_s` for the first batch.

    `step_s`: length of the training step.
    """

    step_s: float
    waits_s: tuple[float, ...]
    first_s: float

    @property
    def mean_s(self) -> float:
        return sum(self.waits_s) / len(self.waits_s)

    @property
    def share(self) -> float:
        """Mean wait over the steps, divided by the length of a step."""
        return self.mean_s / self.step_s if self.step_s else 0.0


def time_waits(
    batches: Iterator[Any], *, step: Callable[[Any], None], step_s: float, num_steps: int
) -> StepWait | None:
    """Fetches `num_steps` batches and calls `step` after each. Returns None if there are fewer than two."""
    waits = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            break
        waits.append(time.perf_counter() - begin)
        step(batch)
    if len(waits) < 2:
        return None
    return StepWait(step_s=step_s, waits_s=tuple(waits[1:]), first_s=waits[0])
