"""Collective reading under the watcher's deadline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.collective_files import CollectiveFiles
from hpctrain.comm.track import Track


@final
class MonitoredFiles:
    """Every reading has the deadline of a collective operation."""

    def __init__(self, inner: CollectiveFiles, *, track: Track) -> None:
        self._inner = inner
        self._track = track

    def read(
        self, path: Path, *, offsets: Sequence[int], lengths: Sequence[int], out: NDArray[np.uint8]
    ) -> None:
        with self._track.during("read", path.name, signature=f"read {path.name}"):
            self._inner.read(path, offsets=offsets, lengths=lengths, out=out)

    def close(self) -> None:
        with self._track.during("close"):
            self._inner.close()
