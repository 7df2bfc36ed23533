"""A signal asks the run to stop; the ranks agree on the step at which they do (F7)."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# SIGTERM: Slurm's preemption and scancel. SIGUSR1: `sbatch --signal=USR1@120`, and what `hpctrain launch`
# sends through mpirun. SIGINT: Ctrl-C on a run of one rank. SIGHUP: the terminal was closed.


class StopRequest:
    """Remembers that this rank was asked to stop. Only the agreed vote in the training loop acts on it.

    A second Ctrl-C (SIGINT) on the same rank ends it at once, as the person at the keyboard expects.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def install(self) -> StopRequest:
        """Take over the stop signals. Outside the main thread (ranks as threads) there are none to take."""
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup, or a shell's background job: it was asked not to react
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def request(self, reason: str) -> None:
        """Ask for a stop from inside the program."""
        self.signal_name = self.signal_name or reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self.restore()
            raise KeyboardInterrupt
        self.request(name)
