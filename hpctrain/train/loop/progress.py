"""Progress of training on rank 0: one line that is updated in place on a terminal, else separate lines."""

from __future__ import annotations

import sys
import time
from collections import deque

from hpctrain.telemetry import tell


class ProgressLine:
    """Prints step, loss, samples/s and remaining time. Prints nothing if `silent`, as on all ranks but rank 0.

    every_s: seconds between lines. on_terminal: True if the user sees the output on a terminal.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        every_s: float,
        silent: bool,
        on_terminal: bool = False,
    ) -> None:
        self._total_steps = total_steps
        self._silent = silent
        # isatty alone is not enough: mpirun gives rank 0 a pseudo-terminal even if its own output is a file. Only
        # `hpctrain launch`, or a rank without a launcher, can find out; hence the parameter.
        self._on_terminal = on_terminal and sys.stdout.isatty()
        self._every_s = min(every_s, 0.5) if self._on_terminal else every_s
        self._last_told = -float("inf")
        self._width = 0
        # (time, step, samples so far) of the last steps, for the current rate instead of the average
        self._history: deque[tuple[float, int, int]] = deque(maxlen=200)

    def step(self, *, step: int, epoch: int, loss: float, lr: float, num_samples: int) -> None:
        """Reports a step. step: number of steps done; num_samples: samples of this step over all ranks."""
        if self._silent:
            return
        now = time.monotonic()
        samples = self._history[-1][2] if self._history else 0
        self._history.append((now, step, samples + num_samples))
        if now - self._last_told < self._every_s and step < self._total_steps:
            return
        self._last_told = now
        line = (
            f"step {step}/{self._total_steps}  epoch {epoch}  loss {loss:.4f}  lr {lr:.3g}{self._rates(step)}"
        )
        if self._on_terminal:
            tell("\r" + line.ljust(self._width), end="")
            self._width = len(line)
        else:
            tell(line)

    def say(self, text: str) -> None:
        """Prints a separate line above the progress line."""
        if self._silent:
            return
        if self._on_terminal and self._width:
            tell("\r" + " " * self._width + "\r", end="")
            self._width = 0
        tell(text)

    def _rates(self, step: int) -> str:
        (t0, s0, n0), (t1, s1, n1) = self._history[0], self._history[-1]
        if t1 <= t0 or s1 <= s0:
            return ""
        left_s = (self._total_steps - step) * (t1 - t0) / (s1 - s0)
        return f"  {(n1 - n0) / (t1 - t0):,.0f} samples/s  {_duration(left_s)} left"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
