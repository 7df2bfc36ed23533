"""Polls reductions until they end: spins briefly, then sleeps, longer each time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

# Sleeps between polls: short enough to notice a message soon, long enough to leave a shared core to backward.
SHORTEST_WAIT_S = 20e-6
LONGEST_WAIT_S = 200e-6
# A caller with nothing else to do spins for so long first: the kernel makes the shortest sleep some 70 us long, and a
# rank that sleeps while the last one arrives keeps that one waiting in turn.
LOOK_ON_S = 500e-6


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
            if now < self._since + LOOK_ON_S:
                os.sched_yield()  # to another rank, where ranks share cores
                return
        sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, self._longest_wait_s)


def run_to_end(reductions: Sequence[Iterator[bool]]) -> None:
    """Runs reductions in turns until all have ended, on the calling thread; waits as `step` does in training."""
    under_way = list(reductions)
    backoff = Backoff()
    while under_way:
        got_on = False
        for reduction in list(under_way):
            try:
                got_on |= next(reduction)
            except StopIteration:
                under_way.remove(reduction)
                got_on = True
        if got_on:
            backoff.reset()
        else:
            backoff.wait(eager=True)
