"""The open files of one checkpoint while its content is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.checkpoint.files.io_errors import read_fully
from hpctrain.checkpoint.loading.check_structure import open_regular
from hpctrain.storage import hash_of

_MAX_OPEN = 128
# Small tensors lie close together: with `read_ahead`, a read of at most _SMALL_BYTES fetches _AHEAD_BYTES at once.
_AHEAD_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
_CACHED_BYTES = 512 << 10  # half of a core's private cache on most machines


@final
class ContentFiles:
    """Reads from the files of a checkpoint, for use by one thread. Files are opened at their first read, and closed at
    the end of the `with` block.
    """

    def __init__(self, paths: Sequence[Path], *, read_ahead: bool = False) -> None:
        """paths: the main file, then the part files by number. read_ahead: set if nearly everything will be read, in
        the order of the files."""
        self._paths = paths
        self._read_ahead = read_ahead
        self._open: dict[int, int] = {}
        self._window: tuple[int, int, memoryview] = (-1, 0, memoryview(b""))  # file, offset, bytes
        self._window_memory = bytearray()
        self._scratch = np.empty(0, dtype=np.uint8)
        self._gather_scratch = np.empty(0, dtype=np.uint8)

    def __enter__(self) -> ContentFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            with suppress(OSError):  # fails on a dead mount; all that was read has been verified
                os.close(fd)
        self._open.clear()

    def name(self, number: int) -> str:
        """Returns a file's name for a message that also names the checkpoint."""
        return "the file" if len(self._paths) == 1 else self._paths[number].name

    def read(self, number: int, buffer: memoryview, *, offset: int) -> None:
        """Fills the buffer from byte `offset` of a file on. Raises OSError, and CheckpointError if the file is too
        short."""
        if not self._read_ahead or buffer.nbytes > _SMALL_BYTES:
            read_fully(self._fd(number), buffer, offset=offset)
            return
        held, start, window = self._window
        if held != number or not start <= offset <= start + len(window) - buffer.nbytes:
            window = self._look_ahead(number, offset)
            start = offset
            if len(window) < buffer.nbytes:
                read_fully(self._fd(number), buffer, offset=offset)
                return
        buffer[:] = window[offset - start : offset - start + buffer.nbytes]

    def read_and_hash(self, number: int, buffer: memoryview, *, offset: int) -> str:
        """As `read`. Returns the hash of the bytes, computed while they are in the processor's cache."""
        if buffer.nbytes <= _CACHED_BYTES:
            self.read(number, buffer, offset=offset)
            return hash_of(buffer)
        fd = self._fd(number)
        digest = xxhash.xxh3_64()
        for start in range(0, buffer.nbytes, _CACHED_BYTES):
            part = buffer[start : start + _CACHED_BYTES]
            read_fully(fd, part, offset=offset + start)
            digest.update(part)
        return digest.hexdigest()

    def scratch(self, num_bytes: int) -> NDArray[Any]:
        """Returns memory for one element run: uint8, shape (num_bytes,), valid until the next call."""
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._scratch[:num_bytes]

    def gather_scratch(self, num_bytes: int) -> NDArray[Any]:
        """Returns memory for one extent: uint8, shape (num_bytes,), valid until the next call."""
        if len(self._gather_scratch) < num_bytes:
            self._gather_scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._gather_scratch[:num_bytes]

    def _look_ahead(self, number: int, offset: int) -> memoryview:
        """Returns up to _AHEAD_BYTES bytes from `offset` on; empty on an error, which the caller's own read then
        raises."""
        if not self._window_memory:
            self._window_memory = bytearray(_AHEAD_BYTES)
        try:
            count = os.preadv(self._fd(number), [self._window_memory], offset)
        except OSError:
            count = 0
        window = memoryview(self._window_memory)[:count]
        self._window = (number, offset, window)
        return window

    def _fd(self, number: int) -> int:
        fd = self._open.get(number)
        if fd is None:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            fd = self._open[number] = open_regular(self._paths[number])
        return fd
