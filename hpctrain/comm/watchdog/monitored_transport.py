"""A transport with the watcher's deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import torch

from hpctrain.comm.interface.transport import Pending, Transport
from hpctrain.comm.watchdog.operation_state import Track
from hpctrain.topology import Topology


@final
class MonitoredTransport:
    """Wraps a `Transport`. The deadline runs while nothing in flight makes progress, and restarts on progress."""

    def __init__(self, inner: Transport, *, track: Track) -> None:
        self._inner = inner
        self._track = track

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def topology(self) -> Topology:
        return self._inner.topology

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        return self._inner.send(buffer, to=to, tag=tag)

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Pending:
        return self._inner.receive(buffer, source=source, tag=tag)

    def all_done(self, pending: Sequence[Pending]) -> bool:
        return self._inner.all_done(pending)

    def share(self, num_bytes: int) -> list[torch.Tensor]:
        with self._track.during("share", f"({num_bytes} bytes here)"):
            return self._inner.share(num_bytes)

    def fence(self) -> None:
        self._inner.fence()

    def begun(self, what: str) -> None:
        self._track.operation, self._track.detail = "reduce", what
        self._track.sequence += 1
        self._track.since = None
        self._inner.begun(what)

    def waits(self, what: str) -> None:
        if self._track.since is None:
            self._track.detail = what
            self._track.since = time.monotonic()
        self._inner.waits(what)

    def progressed(self) -> None:
        self._track.since = None
        self._inner.progressed()

    def close(self) -> None:
        with self._track.during("close"):
            self._inner.close()
