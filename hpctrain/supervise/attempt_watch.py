"""Follows one attempt of a supervised run: its output, its nodes, its progress, and what the ranks are asked for."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from hpctrain.errors import ExitCode
from hpctrain.launch import EndRequest, RankFailure
from hpctrain.supervise.classify import RANK_GONE, STATE_KEPT, is_telling, says_a_loss
from hpctrain.supervise.elastic import ResizeWatch
from hpctrain.supervise.ledger import RunProgress
from hpctrain.supervise.nodes import NodeWatch

# Earlier lines are ignored: the attempt has survived what they report.
_WINDOW_S = 60.0
_MAX_TELLING = 1000
_MAX_RECENT = 1000
_MAX_CHARACTERS = 1000  # per line


@final
class LogLines:
    """The part of a log that the classifier needs: the last lines, and earlier lines that may show a cause.

    Lines are added in order. Memory is bounded, even for a job step that prints for days.
    """

    def __init__(self) -> None:
        self._telling: deque[tuple[int, float, str]] = deque(maxlen=_MAX_TELLING)
        self._recent: deque[tuple[int, float, str]] = deque(maxlen=_MAX_RECENT)
        self._count = 0

    def add(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")[:_MAX_CHARACTERS]
        self._count += 1
        entry = (self._count, time.monotonic(), text)
        self._recent.append(entry)
        if is_telling(text):
            self._telling.append(entry)

    def lines(self) -> tuple[str, ...]:
        """Returns the kept lines of the last minute, in order."""
        since = time.monotonic() - _WINDOW_S
        return tuple(text for _, added, text in sorted({*self._telling, *self._recent}) if added >= since)


# Seconds from the first line that names a lost rank or node until the others are ended: they may still print why.
_GRACE_S = 1.5
# The same if a signal has ended the rank: only lines that are under way are waited for, such as the report of a hang.
_GRACE_AFTER_SIGNAL_S = 0.5
# Seconds in which the nodes that are left may write the state of the last step to their memory.
_KEEPS_WITHIN_S = 2.0
# Seconds from SIGTERM to SIGKILL for ranks whose state is kept.
_KILLED_AFTER_S = 0.1


@final
class Notices:
    """Receives lines that ranks of an elastic run on this machine send past mpirun. A context manager.

    path: the datagram socket for the ranks' variable `NOTICES_VARIABLE`.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hpctrain-notices-")
        self.path = str(Path(self._folder.name, "socket"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def __enter__(self) -> Notices:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread
        self._socket.close()
        self._folder.cleanup()

    def begin(self) -> None:
        """Starts to receive. Call it when the launcher has been started: a fork must not meet this thread."""
        threading.Thread(target=self._receive, name="hpctrain-notices", daemon=True).start()

    def lines(self) -> Iterator[bytes]:
        """Yields the lines that have come since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._lines.get_nowait()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(_MAX_CHARACTERS):
                self._lines.put(data.rstrip(b"\n"))
                os.kill(
                    os.getpid(), signal.SIGCHLD
                )  # `run_launch` looks at once, and not after half a second


@final
class AttemptWatch:
    """An `Observer` that follows one attempt.

    The watch records the start of training and the first loss of a rank or node, and asks the launcher to end the
    attempt after a loss, or if training does not start.

    start_within_s: seconds within which training must start; None for no limit.
    kill_after_s: see `EndRequest`.
    training_begins: function that is called once, with the step from which training starts and the time (seconds since
    1970).
    resize: looks for another number of ranks; None if the number of ranks does not change during an attempt.
    keeps_state: True if ranks that are left after a loss keep the state of their last step on their nodes, and print
    that they do.
    notices: what ranks on this machine report past the launcher; None: nothing.

    lost_at: time of the first sign that a rank or node was lost, in seconds since 1970; None if there was no such sign.
    silent_nodes: nodes that no longer answered.
    resized: why the ranks were asked to stop so that another number of ranks continues; "" if they were not.
    overdue: True if training has not started in time. The ranks are then ended, and output that they print from then on
    is ignored.
    """

    def __init__(
        self,
        progress: RunProgress,
        *,
        nodes: NodeWatch,
        start_within_s: float | None,
        kill_after_s: float,
        training_begins: Callable[[int, float], None],
        resize: ResizeWatch | None = None,
        keeps_state: bool = False,
        notices: Notices | None = None,
    ) -> None:
        self.log = LogLines()
        self.lost_at: float | None = None
        self.silent_nodes: tuple[str, ...] = ()
        self.overdue = False
        self.resized = ""
        self._resize = resize
        self._keeps_state = keeps_state
        self._notices = notices
        self._num_nodes = nodes.num_nodes
        self._launcher = 0
        self._keep_by_s: float | None = None  # until then nodes may report that they keep the state
        self._kept: set[str] = set()  # nodes that keep the state
        self._has_begun = False
        self._kill_after_s = kill_after_s
        self._progress = progress
        self._nodes = nodes
        self._start_by_s = None if start_within_s is None else time.monotonic() + start_within_s
        self._training_begins = training_begins
        self._end_by_s: float | None = None

    def launched(self, pid: int) -> None:
        self._launcher = pid
        self._nodes.launched(pid)
        if self._resize is not None:
            self._resize.begin()
        if self._notices is not None:
            self._notices.begin()

    def saw_line(self, line: bytes, failure: RankFailure | None) -> None:
        if self.overdue:
            return
        self.log.add(line)
        text = line.decode(errors="replace")
        kept = STATE_KEPT.search(text)
        if kept is not None:
            self._kept.add(kept["node"])
        if self.lost_at is not None:
            return
        if failure is not None and failure.exit_code == ExitCode.STOPPED_EARLY:
            return  # the other ranks have saved too, and are about to end
        if failure is None and RANK_GONE.search(text) is None and not says_a_loss(text):
            return
        self.lost_at = time.time()
        if self._keeps_state and self._has_begun:
            self._ask_to_keep()
        else:
            by_signal = failure is not None and failure.signal is not None
            self._end_by_s = time.monotonic() + (_GRACE_AFTER_SIGNAL_S if by_signal else _GRACE_S)

    def must_end(self) -> EndRequest | None:
        for line in self._notices.lines() if self._notices is not None else ():
            with contextlib.suppress(OSError):
                os.write(2, line + b"\n")
            self.saw_line(line, None)
        if self._keep_by_s is None:  # a look may take seconds
            self._nodes.look()
        lost = self._nodes.lost()
        if lost and not self.silent_nodes:
            self.silent_nodes = tuple(lost)
            self.lost_at = min([*lost.values(), *([] if self.lost_at is None else [self.lost_at])])
            self._ask_to_keep()
        if self._keep_by_s is not None and time.monotonic() < self._keep_by_s:
            left = self._num_nodes - len(self.silent_nodes)
            return None if len(self._kept) < left else self._end_after_loss()
        if lost or self._keep_by_s is not None:
            return self._end_after_loss()
        self.look_for_begin()
        if not self._has_begun and self._start_by_s is not None and time.monotonic() > self._start_by_s:
            self.overdue = True
            return self._end("training does not begin")
        if self._end_by_s is not None and time.monotonic() > self._end_by_s:
            return self._end("a rank is lost")
        self._resize_if_wanted()
        return None

    def _end(self, reason: str) -> EndRequest:
        return EndRequest(reason=reason, kill_after_s=self._kill_after_s)

    def _end_after_loss(self) -> EndRequest:
        if self.silent_nodes:
            return self._end(f"{', '.join(self.silent_nodes)} does not answer any more")
        if self._kept:  # nothing remains to be done by the ranks, and mpirun would take two seconds
            self._kill_after_s = min(self._kill_after_s, _KILLED_AFTER_S)
        return self._end("a rank is lost")

    def _ask_to_keep(self) -> None:
        """Asks the ranks that are left to keep the state of their last step on their nodes, if they can."""
        self._keep_by_s = time.monotonic()
        if not self._keeps_state or not self._has_begun:
            return
        self._keep_by_s += _KEEPS_WITHIN_S
        if self._num_nodes > 1:  # the ranks of the node of a lost rank know already
            self._signal(signal.SIGUSR2)

    def _resize_if_wanted(self) -> None:
        wanted = None if self._resize is None or not self._has_begun else self._resize.wanted()
        if wanted is None or self.resized or self.lost_at is not None:
            return
        self.resized = wanted
        say(f"{wanted}; asking the ranks to save and stop")
        self._signal(signal.SIGUSR1)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._launcher, number)

    def look_for_begin(self) -> None:
        """Calls `training_begins` if training has started since the last call."""
        step = None if self._has_begun or self.overdue else self._progress.first_step()
        if step is not None:
            self._has_begun = True
            self._training_begins(step, time.time())


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"hpctrain supervise: {text}", file=sys.stderr, flush=True)
