"""Prints a message for this rank even if a call ends the process or never returns.

If MPI cannot start, MPI ends the process without running Python code. A rank that waits for missing ranks waits in C
code that holds the GIL, so that no Python thread runs. The message is therefore sent in advance to a small helper
process. The helper prints the message if this process ends, or does not cancel the message in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import final

from hpctrain.errors import ExitCode

# Program of the helper. Arguments: PID of the rank's process, time limit in seconds, signal that ends the rank.
# Standard input: the message, then a zero byte if it is withdrawn; end of input without it means that the process has
# ended. Ignores the launcher's SIGTERM. No packages are imported (-S -E), so that it starts fast in any environment.
_SPEAKER = """
import os, select, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
pid, timeout_s, end = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
words, give_up_s = b"", time.monotonic() + timeout_s
late = False
while True:
    late = not select.select([0], [], [], max(0.0, give_up_s - time.monotonic()))[0]
    data = b"" if late else os.read(0, 65536)
    if not data or data.endswith(b"\\0"):
        words += data
        break
    words += data
if late:
    words += b"no answer within %g s: given up\\n" % timeout_s
if not words.endswith(b"\\0"):
    sys.stderr.buffer.write(words)
    sys.stderr.buffer.flush()
if late:
    os.kill(pid, end)
"""

# The signal whose number is the exit code of a failed launch. Its handler is libc's _exit, which is called with the
# signal's number and so exits with that code. A Python handler would not run until the blocked call returns.
_END = signal.Signals(int(ExitCode.LAUNCH))


@final
class ExitNotice:
    """Prints `words` to stderr if this process ends inside the `with` block, or stays in it for `timeout_s` seconds.

    After `timeout_s` seconds the process is also ended, with the exit code of a failed launch, even if the process is
    blocked. Leaving the block, normally or by an exception, cancels the message.
    """

    def __init__(self, words: str, *, timeout_s: float) -> None:
        self._words = words.rstrip("\n") + "\n"
        self._timeout_s = timeout_s
        self._libc = ctypes.CDLL(None)
        self._libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._libc.signal.restype = ctypes.c_void_p

    def __enter__(self) -> ExitNotice:
        leave = ctypes.cast(self._libc._exit, ctypes.c_void_p)
        self._handler_before = self._libc.signal(int(_END), leave)
        arguments = [str(os.getpid()), str(self._timeout_s), str(int(_END))]
        self._speaker = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _SPEAKER, *arguments], stdin=subprocess.PIPE
        )
        assert self._speaker.stdin is not None
        self._speaker.stdin.write(self._words.encode())
        self._speaker.stdin.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._speaker.stdin is not None
        with contextlib.suppress(OSError):
            self._speaker.stdin.write(b"\0")
            self._speaker.stdin.close()
        self._speaker.wait()
        self._libc.signal(int(_END), self._handler_before)
