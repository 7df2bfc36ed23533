"""Signals that ask the run to stop; the ranks agree on the step at which they stop (F7)."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# SIGTERM: Slurm's preemption and scancel. SIGUSR1: `sbatch --signal=USR1@120`, and `hpctrain launch` through
# mpirun. SIGINT: Ctrl-C on a run of one rank. SIGHUP: the terminal was closed.


class StopRequest:
    """Records that this rank was asked to stop. The training loop acts on it after a vote of all ranks.

    A second Ctrl-C (SIGINT) on the same rank ends it at once.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def install(self) -> StopRequest:
        """Installs handlers for the stop signals and returns self. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup, or a shell's background job: the signal is to be ignored
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def restore(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def request(self, reason: str) -> None:
        """Requests a stop from inside the program. The first reason is kept."""
        self.signal_name = self.signal_name or reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self.restore()
            raise KeyboardInterrupt
        self.request(name)
