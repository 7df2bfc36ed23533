"""Waiting for something that makes progress only while it is looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SPIN_S = 1e-3
_SLEEP_S = 20e-6


def poll_until(done: Callable[[], bool]) -> None:
    """Returns when `done()` returns True. Calls it without a pause for a millisecond, then every 20 microseconds."""
    spin_until = time.perf_counter() + _SPIN_S
    while not done():
        if time.perf_counter() < spin_until:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_S)
