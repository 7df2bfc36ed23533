"""What a rank says if it does not come back: for calls that may end the process, or never return.

MPI ends the process in which it cannot start, without giving Python a chance, and a rank whose peers never
come waits in C. So the words are left beforehand with a small process that speaks when this one falls silent.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from types import TracebackType
from typing import final

from hpctrain.errors import ExitCode

# Speaks when its input ends without a zero byte: the process that wrote it is gone. It outlives the
# launcher's SIGTERM for that. No imports of ours and no site packages (-S -E): it starts fast, and anywhere.
_SPEAKER = """
import signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
words = sys.stdin.buffer.read()
if not words.endswith(b"\\0"):
    sys.stderr.buffer.write(words)
    sys.stderr.buffer.flush()
"""


@final
class LastWords:
    """While the `with` block runs: `words` go to stderr if this process ends, or after `timeout_s`.

    After `timeout_s` the process is ended with the exit code of a failed launch. Leaving the block, also by
    an exception, takes the words back.
    """

    def __init__(self, words: str, *, timeout_s: float) -> None:
        self._words = words.rstrip("\n") + "\n"
        self._timeout_s = timeout_s
        self._timer = threading.Timer(timeout_s, self._out_of_time)
        self._timer.daemon = True

    def __enter__(self) -> LastWords:
        self._speaker = subprocess.Popen([sys.executable, "-S", "-E", "-c", _SPEAKER], stdin=subprocess.PIPE)
        assert self._speaker.stdin is not None
        self._speaker.stdin.write(self._words.encode())
        self._speaker.stdin.flush()
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._timer.cancel()
        assert self._speaker.stdin is not None
        with contextlib.suppress(OSError):
            self._speaker.stdin.write(b"\0")
            self._speaker.stdin.close()
        self._speaker.wait()

    def _out_of_time(self) -> None:
        assert self._speaker.stdin is not None
        self._speaker.stdin.write(f"no answer within {self._timeout_s:.0f} s: given up\n".encode())
        self._speaker.stdin.close()
        self._speaker.wait()
        os._exit(ExitCode.LAUNCH)
