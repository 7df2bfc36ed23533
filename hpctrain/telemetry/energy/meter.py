"""Reads the energy counters of a node at intervals."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from hpctrain.telemetry.energy.counter import EnergyCounter
from hpctrain.telemetry.energy.cray import CrayCounter
from hpctrain.telemetry.energy.nvml import NvmlCounter
from hpctrain.telemetry.energy.rapl import RaplCounter

ENERGY = "energy"  # the kind of the records
_LAST_READING_S = 5.0


def open_counters(root: Path = Path("/")) -> list[EnergyCounter]:
    """Returns the energy counters of this node that can be read; often none. root: directory with `sys`."""
    openers: tuple[Callable[[], EnergyCounter], ...] = (
        partial(CrayCounter, root), partial(RaplCounter, root), NvmlCounter,
    )  # fmt: skip
    found = []
    for open_counter in openers:
        with contextlib.suppress(OSError, ValueError):
            found.append(open_counter())
    return found


def total_j(joules: Mapping[str, float]) -> float:
    """Returns the energy of a node, given that of each source: a counter of the whole node includes the others."""
    whole = joules.get(CrayCounter.source)
    return sum(joules.values()) if whole is None else whole


@final
class EnergyMeter:
    """Reads `counters` every `every_s` seconds from `start` to `close`, on a thread of its own.

    The first reading has what was counted since they were opened. A thread, since asking a driver takes milliseconds,
    and a step may last longer than a counter takes to wrap.
    """

    def __init__(self, counters: Sequence[EnergyCounter], *, every_s: float) -> None:
        self.sources = {counter.source: counter.covers for counter in counters}
        self._counters = list(counters)
        self._every_s = every_s
        self._before_j = dict.fromkeys(self.sources, 0.0)
        self._before = time.monotonic()
        self._records: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_until_closed, name="hpctrain-energy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[dict[str, Any]]:
        """Returns the records of the readings since the last call; docs/metrics.md has their fields."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._records.get_nowait())
        return found

    def close(self) -> None:
        """Reads for the last time; `take` returns that too."""
        self._closed.set()
        self._thread.join(_LAST_READING_S)

    def _read_until_closed(self) -> None:
        while not self._closed.wait(self._every_s):
            self._read()
        self._read()

    def _read(self) -> None:
        joules: dict[str, float] = {}
        devices: list[Mapping[str, float | int | None]] = []
        for counter in list(self._counters):
            try:
                now_j = counter.read_j()
            except (OSError, ValueError) as error:
                print(f"hpctrain: no more energy of {counter.source}: {error}", file=sys.stderr, flush=True)
                self._counters.remove(counter)
                continue
            joules[counter.source] = now_j - self._before_j[counter.source]
            self._before_j[counter.source] = now_j
            devices += counter.devices()
        now = time.monotonic()
        seconds, self._before = now - self._before, now
        if joules:
            self._records.put({
                "kind": ENERGY, "time": time.time(), "seconds": seconds, "joules": joules, "total_j": total_j(joules),
                "devices": devices,
            })  # fmt: skip
