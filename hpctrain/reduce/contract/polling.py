"""How reductions are waited for, and how several are taken to their ends in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

# Sleeps: short enough to see a message soon, long enough to leave a shared core to backward.
SHORTEST_WAIT_S = 20e-6
LONGEST_WAIT_S = 200e-6
# Who has nothing else to do looks on for so long first: the kernel makes the shortest sleep some 70 us long, and who
# sleeps through the last rank's arrival keeps that one waiting in turn.
LOOK_ON_S = 500e-6


@final
class Patience:
    """What to do when a look found nothing new: look again at once, then sleep, longer each time."""

    def __init__(
        self, *, shortest_wait_s: float = SHORTEST_WAIT_S, longest_wait_s: float = LONGEST_WAIT_S
    ) -> None:
        self._shortest_wait_s = shortest_wait_s
        self._longest_wait_s = longest_wait_s
        self.got_on()

    def got_on(self) -> None:
        """Something got on: begin anew."""
        self._since: float | None = None
        self._wait_s = self._shortest_wait_s

    def wait(self, sleep: Callable[[float], object] = time.sleep, *, eager: bool) -> None:
        """eager: nobody else in this process has use for the core."""
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
    """Take all reductions as far as they go, in turns, until they have ended; waits as training does in `step`."""
    under_way = list(reductions)
    patience = Patience()
    while under_way:
        got_on = False
        for reduction in list(under_way):
            try:
                got_on |= next(reduction)
            except StopIteration:
                under_way.remove(reduction)
                got_on = True
        if got_on:
            patience.got_on()
        else:
            patience.wait(eager=True)
