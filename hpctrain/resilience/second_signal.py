"""Ends this process at a second request to stop, even if Python is blocked.

Python's own thread that reads signals needs Python's lock, which C code in another thread may hold forever. The
thread of `_second_signal.c` does not need that lock. That thread passes each signal on to Python, and ends the process
if Python does not answer a second request.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, final

_LIBRARY = Path(__file__).with_name("_second_signal")
_ANSWERS_WITHIN_S = 2.0
_SECOND = 128  # added to the number of a signal that is a second request


class _State(ctypes.Structure):
    """The memory that Python shares with the C thread; its layout is that of the structure in `_second_signal.c`."""

    _fields_ = [
        ("reader", ctypes.c_int),
        ("writer", ctypes.c_int),
        ("leave_code", ctypes.c_int),
        ("answered", ctypes.c_int),
        ("handled", ctypes.c_uint64),
        ("same_request_s", ctypes.c_double),
        ("answers_within_s", ctypes.c_double),
        ("leaves_within_s", ctypes.c_double),
        ("who", ctypes.c_char_p),
    ]


_kept: list[_State] = []  # threads may use them as long as the process lives


@functools.cache
def _library() -> Any:
    """Returns the library with the compiled thread; None if the thread was not compiled."""
    paths = [f"{_LIBRARY}{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if os.path.exists(path)), None)
    return None if path is None else ctypes.CDLL(path)


@final
class SecondSignal:
    """The C thread, which reads signal numbers from a pipe, and passes each on to `self.reader` as a byte.

    reader: file descriptor from which the thread reads.

    handled: signals that ask for a stop.
    same_request_s: a signal that arrives at least this many seconds after the first one is a second request.
    leaves_within_s: the process ends at most this many seconds after a second request, whatever Python does.
    who: description of this rank, for the message.

    Decode the bytes with `number_of`. Raises OSError if the thread cannot be started or was not compiled.
    """

    def __init__(
        self, reader: int, *, handled: Iterable[int], same_request_s: float, leaves_within_s: float, who: str
    ) -> None:
        library = _library()
        if library is None:
            raise OSError("the thread for signals was not compiled: run make setup")
        self.reader, writer = os.pipe()
        self._state = _State(
            reader=reader, writer=writer, leave_code=-1, handled=sum(1 << number for number in set(handled)),
            same_request_s=same_request_s, answers_within_s=_ANSWERS_WITHIN_S, leaves_within_s=leaves_within_s,
            who=who.encode(errors="replace")[:200],
        )  # fmt: skip
        if library.second_signal_start(ctypes.byref(self._state)):
            os.close(self.reader)
            os.close(writer)
            raise OSError("the thread for signals cannot be started")
        _kept.append(self._state)

    @staticmethod
    def number_of(byte: int) -> tuple[int, bool]:
        """Decodes a byte from `reader`: returns the signal number, and True if the signal is a second request."""
        return byte & ~_SECOND, bool(byte & _SECOND)

    def leave_with(self, code: int | None) -> None:
        """Sets the exit code after a second request; None means 128 + the signal's number."""
        self._state.leave_code = -1 if code is None else code

    def answer(self) -> None:
        """Tells the C thread that Python has received the second request and ends the process itself."""
        self._state.answered = 1
