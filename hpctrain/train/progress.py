"""What rank 0 tells while training: one line, renewed on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque

from hpctrain.telemetry import tell


class ProgressLine:
    """Step, loss, samples/s and time left. Silent on every rank but the one it is made for."""

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
        # mpirun gives rank 0 a pseudo-terminal even when its own output is a file: only `hpctrain launch`,
        # which sees the real one, or a rank without a launcher can tell.
        self._on_terminal = on_terminal and sys.stdout.isatty()
        self._every_s = min(every_s, 0.5) if self._on_terminal else every_s
        self._last_told = -float("inf")
        self._width = 0
        # (time, step, samples so far): the rate is that of the last stretch, not of the start
        self._history: deque[tuple[float, int, int]] = deque(maxlen=200)

    def step(self, *, step: int, epoch: int, loss: float, lr: float, num_samples: int) -> None:
        """Called after each step. step: steps done; num_samples: samples of this step over all ranks."""
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
        """A line of its own, above the progress line."""
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
