"""A signal that asks the run for a checkpoint. The ranks agree on the step, as they do for a stop."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, final

from hpctrain.resilience.stop_signals import SignalName

# Slurm sends it by `scancel --signal=USR2`; mpirun, srun and `hpctrain launch` pass it on to every rank.
DEFAULT_SAVE_SIGNAL: SignalName = "SIGUSR2"


@final
class SaveSignal:
    """Records when this rank received the signal `name`."""

    def __init__(self, name: SignalName = DEFAULT_SAVE_SIGNAL) -> None:
        self._signal = signal.Signals[name]
        self._previous: Any = None
        self._installed = False
        self.received_s: float | None = None  # on the monotonic clock

    def install(self) -> SaveSignal:
        """Installs the handler and returns self. Does nothing outside the main thread (ranks as threads)."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(self._signal) is not signal.SIG_IGN:
            self._previous = signal.signal(self._signal, self._handle)
            self._installed = True
        return self

    def restore(self) -> None:
        if self._installed:
            signal.signal(self._signal, self._previous)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received_s = time.monotonic()
