"""Measures the parts of a step by name, and formats durations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Divides the time of a step into named parts.


# Parts of a step that follow one another on the main thread: with `other`, the rest, they add up to `step`.
PARTS = ("input", "compute", "bubble", "exposed_sync", "checkpoint", "evaluation")

# Called with the name, start and end of a span, in seconds of `time.perf_counter`.
Observer = Callable[[str, float, float], object]


class StepClock:
    """Sums seconds by name from one `lap` to the next.

    The names in `PARTS` are parts of a step: `input`, waiting for a batch; `compute`, forward, backward and optimizer;
    `bubble`, waiting of this rank's pipeline stages for others; `exposed_sync`, waiting for communication. Other names
    overlap these: `hidden_sync`, the part of `compute` during which a reduction ran; `after_sync`, from the end of the
    reduction to the end of the step; `sync`, the total time of the reduction, on any thread; `device_compute`, the time
    of a GPU, by events; `own_write`, in steps in which a checkpoint was committed, the time in which this rank wrote
    its part, on any thread.

    observer: a function that is called for each span of a part, if set.
    """

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._lap_started = time.perf_counter()
        self._sync_ended: float | None = None

    @contextmanager
    def span(self, name: str, *, what: str | None = None) -> Iterator[None]:
        """Adds the duration of the `with` block to `name`, even if the block raises. `what` is as in `add`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, seconds=time.perf_counter() - started, what=what)

    def add(self, name: str, *, seconds: float, ended: float | None = None, what: str | None = None) -> None:
        """Adds `seconds` to `name`.

        ended: the end of the span, by `time.perf_counter`; None: now. what: the name for the observer; None: `name`.
        """
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if self.observer is not None and name in PARTS:
            end = time.perf_counter() if ended is None else ended
            self.observer(what or name, end - seconds, end)

    def recount(self, begin: float, end: float, *, of: str, to: str) -> None:
        """Moves the time from `begin` to `end`, by `time.perf_counter`, from the name `of` to the name `to`."""
        self._seconds[of] -= end - begin
        self.add(to, seconds=end - begin, ended=end)

    def sync_ended(self, at: float) -> None:
        """Stores when the step's reduction ended, by `time.perf_counter`. The last call of a lap counts."""
        self._sync_ended = at

    def lap(self) -> dict[str, float]:
        """Returns the seconds by name since the last lap, and starts the next one.

        `step` is the total, and `other` the part of it that is in none of `PARTS`. `after_sync` is 0 without
        `sync_ended`.
        """
        now = time.perf_counter()
        seconds = self._seconds
        step = now - self._lap_started
        # Clocks read one after another may differ by some ns from their sum.
        seconds["other"] = max(0.0, step - sum(seconds[name] for name in PARTS))
        seconds["step"] = step
        seconds["after_sync"] = now - self._sync_ended if self._sync_ended is not None else 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._lap_started = now
        self._sync_ended = None
        return seconds


# Durations in words.


def in_words(seconds: float) -> str:
    """Returns a duration as text: `0.12 s`, `45 s`, `12 min`, `3.5 h`, `2 days`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    for unit_s, name in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.0f} s"
