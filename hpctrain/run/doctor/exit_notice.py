"""What a rank says if it does not come back: for calls that may end the process, or never return.

MPI ends the process in which it cannot start, without giving Python a chance; and a rank whose peers never
come waits in C, holding Python's lock, so that no thread of ours runs. The words are therefore left
beforehand with a small process that speaks when this one falls silent.
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

# Arguments: the process to speak for, how long it may take, the signal that ends it. Input: the words, and a
# zero byte once they are taken back; input that ends without it means that the process is gone. It outlives
# the launcher's SIGTERM. No imports of ours and no site packages (-S -E): it starts fast, and anywhere.
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

# The signal whose number is the exit code of a failed launch: its handler is libc's _exit itself, which ends
# the process with the number that it is given. A Python handler would wait for the call that never returns.
_END = signal.Signals(int(ExitCode.LAUNCH))


@final
class LastWords:
    """While the `with` block runs: `words` go to stderr if this process ends, or after `timeout_s`.

    After `timeout_s` the process is ended with the exit code of a failed launch, whatever it is doing.
    Leaving the block, also by an exception, takes the words back.
    """

    def __init__(self, words: str, *, timeout_s: float) -> None:
        self._words = words.rstrip("\n") + "\n"
        self._timeout_s = timeout_s
        self._libc = ctypes.CDLL(None)
        self._libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._libc.signal.restype = ctypes.c_void_p

    def __enter__(self) -> LastWords:
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
