"""Files, messages, transports and remote memory with deadlines; `Monitored` opens them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm.interface.collective_files import CollectiveFiles, CollectiveWriter
from hpctrain.comm.interface.remote_memory import RemoteMemory
from hpctrain.comm.interface.transport import PeerMessages, Pending, Transport
from hpctrain.comm.watchdog.operation_state import Track
from hpctrain.topology import Topology


@final
class MonitoredFiles:
    """`CollectiveFiles` with a deadline for each read and for each collective step of a write."""

    def __init__(self, inner: CollectiveFiles, *, track: Track) -> None:
        self._inner = inner
        self._track = track

    def read(
        self, path: Path, *, offsets: Sequence[int], lengths: Sequence[int], out: NDArray[np.uint8]
    ) -> None:
        with self._track.during("read", path.name, signature=f"read {path.name}"):
            self._inner.read(path, offsets=offsets, lengths=lengths, out=out)

    def writer(self, path: Path, *, hints: Mapping[str, str]) -> CollectiveWriter | None:
        with self._track.during("open", path.name, signature=f"open {path.name}"):
            inner = self._inner.writer(path, hints=hints)
        return None if inner is None else MonitoredWriter(inner, track=self._track, name=path.name)

    def close(self) -> None:
        with self._track.during("close"):
            self._inner.close()


@final
class MonitoredWriter:
    """`CollectiveWriter` with a deadline for each collective step."""

    def __init__(self, inner: CollectiveWriter, *, track: Track, name: str) -> None:
        """Wraps `inner`.

        name: name of the file, for messages.
        """
        self._inner = inner
        self._track = track
        self._name = name

    @property
    def rank(self) -> int:
        return self._inner.rank

    def gather(self, mine: Sequence[int]) -> NDArray[np.int64]:
        with self._track.during("write", self._name, signature=f"write {self._name}"):
            return self._inner.gather(mine)

    def write(self, data: NDArray[np.uint8], *, offset: int) -> int:
        return self._inner.write(data, offset=offset)

    def exchange(self, outgoing: Sequence[Sequence[tuple[int, memoryview]]]) -> list[tuple[int, memoryview]]:
        with self._track.during("write", self._name, signature=f"write {self._name}"):
            return self._inner.exchange(outgoing)

    def sync(self) -> None:
        with self._track.during("sync", self._name, signature=f"sync {self._name}"):
            self._inner.sync()

    def close(self) -> None:
        with self._track.during("close", self._name, signature=f"close {self._name}"):
            self._inner.close()


@final
class MonitoredMessages:
    """`PeerMessages` with a deadline, which runs while a thread waits for a message."""

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


@final
class MonitoredTransport:
    """`Transport` with a time limit for operations in flight that make no progress; any progress restarts the timer."""

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


@final
class MonitoredRemoteMemory:
    """`RemoteMemory` with a time limit for waits in which this rank sees no progress.

    Reads and writes have no limit of their own, since no other rank takes part in them.
    """

    def __init__(self, inner: RemoteMemory, *, track: Track) -> None:
        self._inner = inner
        self._track = track
        track.operation = "wait"
        # Without a call in between: they are called for each sample.
        self.get, self.flush = inner.get, inner.flush
        self.put, self.complete = inner.put, inner.complete
        self.store, self.fetch_add, self.sync = inner.store, inner.fetch_add, inner.sync

    @property
    def local(self) -> NDArray[np.uint8]:
        return self._inner.local

    def publish(self) -> None:
        self._inner.publish()

    def waits(self, what: str, *, place: int) -> None:
        self._track.detail, self._track.sequence = what, place
        if self._track.since is None:
            self._track.since = time.monotonic()

    def progressed(self, *, place: int) -> None:
        self._track.sequence, self._track.since = place, None

    def close(self) -> None:
        self._track.closed, self._track.since = True, None
        self._inner.close()
