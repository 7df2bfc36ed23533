"""Signals that ask a run to stop.

Each rank records the request; the ranks then agree on the step at which they stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, final

from hpctrain.errors import LaunchError
from hpctrain.launch import identify
from hpctrain.resilience.second_signal import SecondSignal
from hpctrain.resilience.stop_signals import DEFAULT_STOP_SIGNALS, SignalName, keep_from_children

# One request may arrive more than once: from Slurm, and from srun, to which the batch script forwards it; and at a time
# limit Slurm sends SIGTERM twice. A signal that arrives this long after the first one is a second request.
SAME_REQUEST_S = 2.0
# Seconds after a second request when this process ends even if `leave`, or printing, hangs too.
_LEAVE_MAY_TAKE_S = 15.0


@final
class StopRequest:
    """Records that this rank was asked to stop. The training loop acts on the request after a vote of all ranks.

    A second request ends this rank at once, without saving. A second request is any of the signals at least
    `SAME_REQUEST_S` seconds after the first signal, or a second Ctrl-C (SIGINT). A separate thread handles the second
    request, also while the main thread waits inside a library. If Python itself is blocked, a thread of the C library
    (`SecondSignal`) handles the second request.

    Args:
        names: Signals to handle.

    Attributes:
        signal_name: Name of the signal of the first request, or the reason if the request was made with `request`;
            None before the first request.
        leave: Function that ends the rank at a second request, called with the exit code. Replace it to end all
            ranks.
        observer: Function that the thread for signals calls with each signal that this process handles, before the
            thread acts on the signal; None: no function is called.
        leave_code: Exit code after a second request; None means 128 + the signal's number. Set it once the state is
            saved.
    """

    def __init__(self, names: Sequence[SignalName] = DEFAULT_STOP_SIGNALS) -> None:
        self.signal_name: str | None = None
        self.leave: Callable[[int], None] = os._exit
        self.observer: Callable[[int], None] | None = None
        self._leave_code: int | None = None
        self._second: SecondSignal | None = None
        self._signals = [signal.Signals[name] for name in names]
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1
        self._writer = -1
        self._first_s: float | None = None  # when the first signal came, on the monotonic clock
        self._interrupts = 0

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    @property
    def leave_code(self) -> int | None:
        return self._leave_code

    @leave_code.setter
    def leave_code(self, code: int | None) -> None:
        self._leave_code = code
        if self._second is not None:
            self._second.leave_with(code)

    def install(self) -> StopRequest:
        """Installs the signal handlers and returns self. Does nothing outside the main thread.

        A signal that is ignored (nohup, a background job of a shell) stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._signals:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup, or a shell's background job: the signal is to be ignored
            self._previous[number] = signal.signal(number, self._handle)
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The interpreter writes the number of each signal here at once, whatever the main thread does.
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        with contextlib.suppress(OSError):
            self._second = SecondSignal(
                reader, handled=self._previous, same_request_s=SAME_REQUEST_S, leaves_within_s=_LEAVE_MAY_TAKE_S,
                who=_describe_rank(),
            )  # fmt: skip
            self._second.leave_with(self._leave_code)
            reader = self._second.reader
        os.register_at_fork(after_in_child=self._forget_in_child)
        threading.Thread(target=self._read, args=(reader,), name="hpctrain-signals", daemon=True).start()
        keep_from_children(self._previous)
        return self

    def restore(self) -> None:
        """Restores the signal handlers that were installed before."""
        if self._writer >= 0:
            self._restore()
            keep_from_children(())

    def request(self, reason: str) -> None:
        """Requests a stop from inside the program. If a request exists already, its reason is kept."""
        self.signal_name = self.signal_name or reason

    # ------------------------------------------------------------------ details

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._writer)  # ends the thread
        self._writer = -1
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def _read(self, reader: int) -> None:
        handled = set(self._previous)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for byte in numbers:
                    number, is_second = (byte, None) if self._second is None else self._second.number_of(byte)
                    if self.observer is not None:
                        self.observer(number)
                    if number in handled:
                        self._received(signal.Signals(number), is_second=is_second)

    def _received(self, number: signal.Signals, *, is_second: bool | None) -> None:
        """Records one received signal, and ends the rank if it is a second request.

        is_second: True if the C thread has recognized a second request; None if it has not decided, or does not run.
        """
        self.request(number.name)
        now_s = time.monotonic()
        self._interrupts += number == signal.SIGINT
        if self._first_s is None:
            self._first_s = now_s
            return
        waited_s = now_s - self._first_s
        if is_second is None:
            is_second = waited_s >= SAME_REQUEST_S or (number == signal.SIGINT and self._interrupts > 1)
        if is_second:
            self._leave(number, after_s=waited_s)

    def _leave(self, number: signal.Signals, *, after_s: float) -> None:
        code = 128 + number if self.leave_code is None else self.leave_code
        if self._second is not None:
            self._second.answer()
        else:
            last_resort = threading.Timer(_LEAVE_MAY_TAKE_S, os._exit, args=(code,))
            last_resort.daemon = True
            last_resort.start()
        text = (
            f"{number.name}, {after_s:.1f} s after {self.signal_name}: ending at once, nothing more is saved"
        )
        with contextlib.suppress(OSError):
            os.write(2, f"hpctrain: {_describe_rank()}: {text} (exit code {code})\n".encode())
        self.leave(code)

    def _forget_in_child(self) -> None:
        """Removes the handlers in a forked child, such as a worker of torch's DataLoader.

        Signals that the child receives do not concern the parent.
        """
        if self._writer >= 0:
            self._restore()


def _describe_rank() -> str:
    with contextlib.suppress(LaunchError):
        return identify(os.environ, socket.gethostname()).describe()
    return "this rank"
