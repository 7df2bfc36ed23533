"""Collective reading and writing with the watcher's deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.collective_writer import CollectiveWriter
from hpctrain.comm.watchdog.operation_state import Track


@final
class MonitoredFiles:
    """Wraps `CollectiveFiles`: each read, and each collective step of a write, has the deadline."""

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
    """A `CollectiveWriter` whose collective steps have a deadline."""

    def __init__(self, inner: CollectiveWriter, *, track: Track, name: str) -> None:
        """name: name of the file, for the message."""
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
