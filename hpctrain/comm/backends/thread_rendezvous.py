"""Synchronization of the threads that act as ranks in `hpctrain.comm.backends.threads_world`."""

from __future__ import annotations

import threading
from typing import Any

from hpctrain.errors import BufferMismatch, CommunicationError


class Meeting:
    """A barrier for the threads of one group, and a slot for each in which it passes a value to the others."""

    def __init__(self, run: ThreadsRun, *, members: tuple[int, ...]) -> None:
        self.run = run
        self.members = members
        self.barrier = threading.Barrier(len(members))
        self.laid: list[tuple[str, Any]] = [("", None)] * len(members)
        run.add(self)

    def wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise LeftError(self.run.reason or "the group was broken") from None

    def exchange(self, *, place: int, operation: str, value: Any) -> list[Any]:
        """Passes `value` to the other ranks and returns every rank's value. Collective over the group.

        Call `wait` before any of the values changes. Raises BufferMismatch on every rank if the ranks called different
        operations, LeftError if a rank has ended.
        """
        self.laid[place] = (operation, value)
        self.wait()
        laid = list(self.laid)
        called = {name for name, _ in laid}
        if len(called) > 1:
            each = ", ".join(f"rank {r} {name}" for r, (name, _) in zip(self.members, laid, strict=True))
            self.wait()
            raise BufferMismatch(f"ranks called different operations: {each}", agreed=True)
        return [value for _, value in laid]


class LeftError(CommunicationError):
    """Another rank has ended or aborted, so this one cannot continue: a consequence, never the cause."""


class ThreadsRun:
    """State of one call of `run_threads`: all its meetings, so that the end of one rank ends every wait."""

    def __init__(self) -> None:
        self.reason = ""
        self.exit_code: int | None = None
        self._meetings: list[Meeting] = []
        self._lock = threading.Lock()

    def add(self, meeting: Meeting) -> None:
        with self._lock:
            self._meetings.append(meeting)
            if self.reason:
                meeting.barrier.abort()

    def end(self, reason: str) -> None:
        with self._lock:
            self.reason = self.reason or reason
            for meeting in self._meetings:
                meeting.barrier.abort()
