"""Prints the progress of a measurement to stderr: one line updated in place on a terminal, else a line every 10 s."""

from __future__ import annotations

import sys
import time

FIRST_AFTER_S = 3.0


class MeasurementProgress:
    """Prints the fraction of the work that is done and the estimated remaining time.

    Call the object with the fraction, 0 to 1. It prints nothing if `shown` is False.
    """

    def __init__(self, *, what: str, shown: bool) -> None:
        self._what = what
        self._shown = shown
        self._started_s: float | None = None  # time of the first call, where the measured work begins
        self._in_place = sys.stderr.isatty()
        self._every_s = 0.5 if self._in_place else 10.0
        self._reported_s = time.monotonic() + FIRST_AFTER_S - self._every_s
        self._width = 0

    def __call__(self, share: float) -> None:
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s = now_s
        if not self._shown or now_s - self._reported_s < self._every_s or share <= 0:
            return
        self._reported_s = now_s
        left_s = (now_s - self._started_s) * (1 - share) / share
        line = f"{self._what}: {share:.0%}, about {left_s:.0f} s left"
        if self._in_place:
            print(f"\r{line.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clears the line that is updated in place."""
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
            self._width = 0
