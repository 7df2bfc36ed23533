"""What a rank waits for: operations of its communicators, and its own input.

The rank's threads write these objects, and the rank's watcher reads them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final


@dataclass(slots=True)
class Track:
    """Current operation of one communicator. Written by the thread that uses the communicator, read by the watcher.

    group: name of the communicator, the same on all members.
    members: world ranks of the communicator.
    sequence: number of operations that were started so far.
    operation, detail: name and description of the current operation; of the last operation if none is running.
    signature: text with the operation's arguments, which must be equal on all ranks; None if ranks do not compare it.
    limited: False while the time limit is suspended.
    since: start of the current operation on the monotonic clock; None if no operation is running.
    ended: end of the last operation, in seconds since 1970; None before the first operation has ended.
    closed: True if there will be no more operations.
    """

    group: str
    members: tuple[int, ...]
    sequence: int = 0
    operation: str = "nothing"
    detail: str = ""
    signature: str | None = None
    limited: bool = True
    since: float | None = None  # monotonic; None: in no operation
    ended: float | None = None  # the last one, in seconds since 1970; None: none did
    closed: bool = False

    @contextlib.contextmanager
    def during(
        self, operation: str, detail: str = "", *, signature: str | None = None, counted: bool = True
    ) -> Iterator[None]:
        """Marks one operation as running in the `with` block.

        counted: False if the block only waits for an operation that was already counted when it was started.
        """
        self.operation, self.detail = operation, detail
        if counted:
            self.signature = signature
            self.sequence += 1
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None
            self.ended = time.time()

    def progress(self) -> tuple[int, float | None]:
        """Returns a value that changes whenever an operation starts or ends."""
        return self.sequence, self.since

    def waited_s(self) -> float:
        """Returns the seconds since the current operation started; 0 without an operation, or without a time limit."""
        since = self.since
        return 0.0 if since is None or not self.limited else time.monotonic() - since

    def describe(self) -> str:
        return f"{self.operation} number {self.sequence} of {self.group} {self.detail}".rstrip()


# Seconds of waiting for input after which the board states that this rank waits for it.
_SAID_AFTER_S = 2.0


@final
class InputWait:
    """A wait of this rank for a batch that its transform, dataset or filesystem has not delivered yet.

    No other rank takes part in the wait.

    describe: function that returns a text: what the rank waits for.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self.since = time.monotonic()

    advice = (
        "other ranks are not the cause: the transform, the dataset or the filesystem hangs; if it is only slow, "
        "raise run.timeout_s or limits.input_s"
    )

    def waited_s(self) -> float:
        """Returns the seconds since the wait started."""
        return time.monotonic() - self.since

    def describe(self) -> str:
        try:
            return f"its input: {self._describe()}"
        except Exception as error:  # a message must not keep a rank from ending
            return f"its input ({type(error).__name__} while finding out which: {error})"


Wait: TypeAlias = Track | InputWait


@final
class InputWaits:
    """The current waits of one rank for its input, and the input that the rank's threads are producing. Thread-safe."""

    def __init__(self) -> None:
        self._waits: tuple[InputWait, ...] = ()
        self._making: dict[int, str] = {}  # by thread; each thread changes only its own entry
        self._changing = threading.Lock()
        self.making_changed: Callable[[], object] = lambda: None
        """Function that is called when a thread starts to produce input, and when it has finished."""

    @contextlib.contextmanager
    def during(self, describe: Callable[[], str]) -> Iterator[None]:
        """Records a wait for input for the duration of the `with` block.

        describe: function that returns a text: what the rank waits for.
        """
        wait = InputWait(describe)
        with self._changing:
            self._waits = (*self._waits, wait)
        try:
            yield
        finally:
            with self._changing:
                self._waits = tuple(one for one in self._waits if one is not wait)

    @contextlib.contextmanager
    def making(self, what: str) -> Iterator[None]:
        """Records that this thread produces input in the `with` block, in code that may hold Python's lock.

        what: name of the input.
        """
        thread = threading.get_ident()
        self._making[thread] = what
        self.making_changed()
        try:
            yield
        finally:
            del self._making[thread]
            self.making_changed()

    @property
    def made(self) -> str:
        """The names of the inputs that threads are producing now; "" if there are none."""
        return "; ".join(self._making.copy().values())

    @property
    def longest(self) -> InputWait | None:
        waits = self._waits
        return waits[0] if waits else None  # they are in the order of their beginning

    @property
    def longest_s(self) -> float:
        return 0.0 if (wait := self.longest) is None else wait.waited_s()

    def late(self, tracks: Sequence[Track], *, limit_s: float) -> InputWait | None:
        """Returns this rank's longest wait for input if it is longer than `limit_s`, otherwise None.

        tracks: states of this rank's communicators.

        Returns None also if an operation on a communicator was started during the wait and is still running, because
        that operation has a time limit of its own.
        """
        wait = self.longest
        if wait is None or wait.waited_s() <= limit_s:
            return None
        inside = any((since := track.since) is not None and since >= wait.since for track in tracks)
        return None if inside else wait

    def forgive(self, seconds: float) -> None:
        """Subtracts `seconds` from the length of each current wait."""
        for wait in self._waits:
            wait.since += seconds

    def text(self) -> str:
        """Returns what this rank waits for; "" if it does not wait, or has waited for less than 2 s."""
        wait = self.longest
        if wait is None or wait.waited_s() < _SAID_AFTER_S:
            return ""
        return f"waits for {wait.describe()}"


# Progress counts as usual for this long after the last progress, or for this many times the usual gap.
_QUIET_AFTER_S = 2.0
_QUIET_AFTER_GAPS = 3.0
_GAPS_FORGOTTEN = 0.99  # factor on the usual time between two, for each look that finds progress


@dataclass(slots=True, kw_only=True)
class ProgressMonitor:
    """Judges whether operations start and end about as often as before.

    at_most_s: seconds without progress after which operations no longer count as making progress, however slow they
    were before.
    """

    at_most_s: float
    _seen: tuple[tuple[int, float | None], ...] = ()
    _seen_at_s: float = field(default_factory=time.monotonic)
    _usual_gap_s: float = 0.0

    def is_usual(self, progress: Iterable[tuple[int, float | None]], *, now_s: float) -> bool:
        """Returns True if the time since the last progress is not longer than usual.

        progress: result of `Track.progress` for each communicator.
        now_s: current monotonic time, not before that of the last call.
        """
        found = tuple(progress)
        if found != self._seen:
            self._usual_gap_s = max(now_s - self._seen_at_s, _GAPS_FORGOTTEN * self._usual_gap_s)
            self._seen, self._seen_at_s = found, now_s
        quiet_after_s = max(_QUIET_AFTER_S, _QUIET_AFTER_GAPS * self._usual_gap_s)
        return now_s < self._seen_at_s + min(quiet_after_s, self.at_most_s)
