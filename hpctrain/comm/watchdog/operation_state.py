"""What one communicator is doing now: the line between the thread that communicates and the one that watches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Track:
    """What one communicator does now. Written by the thread that uses it, read by the watcher.

    signature: what must be equal on all ranks in one operation; None where nothing is compared.
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
        """Mark the time of one operation. counted: False for the wait for one that was counted when it was started."""
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
        """How long the operation under way has taken; 0 in none."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since

    def describe(self) -> str:
        return f"{self.operation} number {self.sequence} of {self.group} {self.detail}".rstrip()
