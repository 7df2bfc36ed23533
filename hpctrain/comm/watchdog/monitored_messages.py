"""Messages of a group with the watcher's deadline."""

from __future__ import annotations

import threading
from typing import final

import torch

from hpctrain.comm.interface.peer_messages import PeerMessages
from hpctrain.comm.interface.transport import Pending
from hpctrain.comm.watchdog.operation_state import Track


@final
class MonitoredMessages:
    """Wraps `PeerMessages`: the deadline runs while a thread waits for a message."""

    def __init__(self, inner: PeerMessages, *, track: Track) -> None:
        self._inner = inner
        self._track = track
        # A track holds one operation: of several threads that wait, one after another is watched.
        self._watched = threading.Lock()

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        return self._inner.send(buffer, to=to, tag=tag)

    def receive(self, buffer: torch.Tensor, *, source: int | None, tag: int) -> Pending:
        return self._inner.receive(buffer, source=source, tag=tag)

    def finished(self, pending: Pending) -> bool:
        return self._inner.finished(pending)

    def wait(self, pending: Pending, *, what: str) -> None:
        if self._inner.finished(pending):
            return
        if not self._watched.acquire(blocking=False):
            self._inner.wait(pending, what=what)
            return
        try:
            with self._track.during("message", what):
                self._inner.wait(pending, what=what)
        finally:
            self._watched.release()

    def source_of(self, pending: Pending) -> int:
        return self._inner.source_of(pending)

    def close(self) -> None:
        self._inner.close()
        self._track.closed = True
