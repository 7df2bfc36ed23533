"""State of one communicator's current operation, shared by the thread that communicates and the watcher."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Track:
    """Current operation of one communicator. Written by the thread that uses it, read by the watcher.

    signature: text that must be equal on all ranks in one operation; None: not compared.
    """

    group: str
    members: tuple[int, ...]
    sequence: int = 0
    operation: str = "nothing"
    detail: str = ""
    signature: str | None = None
    since: float | None = None  # monotonic; None: in no operation

    @contextlib.contextmanager
    def during(
        self, operation: str, detail: str = "", *, signature: str | None = None, counted: bool = True
    ) -> Iterator[None]:
        """Marks one operation as running. counted: False for the wait of one that was counted at its start."""
        self.operation, self.detail = operation, detail
        if counted:
            self.signature = signature
            self.sequence += 1
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None

    def waited_s(self) -> float:
        """Seconds since the current operation began; 0 if there is none."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since

    def describe(self) -> str:
        return f"{self.operation} number {self.sequence} of {self.group} {self.detail}".rstrip()
