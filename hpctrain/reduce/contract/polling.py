"""Polls reductions until they end: spins briefly, then sleeps, longer each time."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar, final

Result = TypeVar("Result")

# Sleeps between polls: short enough for a fast reaction to messages, long enough to leave a shared core to backward.
SHORTEST_WAIT_S = 20e-6
LONGEST_WAIT_S = 200e-6
# Where ranks outnumber their cores a poll takes processor time from a rank that computes, and the reaction to a message
# waits for the core anyway.
LONGEST_WAIT_CROWDED_S = 2e-3
# A caller with nothing else to do first spins for this long: the kernel rounds the shortest sleep up to about 70 us,
# and a rank that sleeps while the last one arrives delays that one in turn.
SPIN_S = 500e-6


@final
class Backoff:
    """Waits between polls that found no progress: not at all at first, then in sleeps that double up to a limit."""

    def __init__(
        self, *, shortest_wait_s: float = SHORTEST_WAIT_S, longest_wait_s: float = LONGEST_WAIT_S
    ) -> None:
        self._shortest_wait_s = shortest_wait_s
        self._longest_wait_s = longest_wait_s
        self.reset()

    def reset(self) -> None:
        """Resets the waits: the last poll found progress."""
        self._since: float | None = None
        self._wait_s = self._shortest_wait_s

    def wait(self, sleep: Callable[[float], object] = time.sleep, *, eager: bool) -> None:
        """Waits once. eager: no other thread of this process needs the core, so spin first."""
        if eager:
            now = time.perf_counter()
            if self._since is None:
                self._since = now
            if now < self._since + SPIN_S:
                os.sched_yield()  # for another rank, if ranks share cores
                return
        sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, self._longest_wait_s)


def result_of(turns: Generator[bool, None, Result]) -> Result:
    """Takes all turns on the calling thread, waiting as `step` does in training. Returns the generator's result."""
    found: list[Result] = []

    def until_result() -> Iterator[bool]:
        found.append((yield from turns))

    run_to_end([until_result()])
    return found[0]


def run_to_end(reductions: Sequence[Iterator[bool]]) -> None:
    """Polls the reductions alternately until all have ended, on the calling thread; waits as `step` does in
    training."""
    in_flight = list(reductions)
    backoff = Backoff()
    while in_flight:
        progressed = False
        for reduction in list(in_flight):
            try:
                progressed |= next(reduction)
            except StopIteration:
                in_flight.remove(reduction)
                progressed = True
        if progressed:
            backoff.reset()
        else:
            backoff.wait(eager=True)


def until(ready: Callable[[], bool]) -> Iterator[bool]:
    """Polls `ready` and ends when it returns True. Yields at each other poll: True (progress was made before) at the
    first, then False (no progress)."""
    progressed = True
    while not ready():
        yield progressed
        progressed = False


def one_round(active: deque[Iterator[bool]]) -> Iterator[bool]:
    """Advances each generator once and removes those that have ended. Yields True if any made progress."""
    progressed = False
    for _ in range(len(active)):
        chunk = active.popleft()
        try:
            progressed |= next(chunk)
        except StopIteration:
            progressed = True
        else:
            active.append(chunk)
    yield progressed
