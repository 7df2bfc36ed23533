"""LRU cache of decoded chunks, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class ChunkKey(NamedTuple):
    """Identifies a chunk of a field of a shard. place: index of the chunk in each dimension."""

    shard: int
    field: str
    place: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Decoded elements, native-endian, of the chunk's shape. lengths: int64, one per row, for ragged fields."""

    values: NDArray[Any]
    lengths: NDArray[np.int64] | None = None

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (self.lengths.nbytes if self.lengths is not None else 0)


class _InMaking:
    """A chunk that one thread is making while others wait. One per chunk, so it must cost less than a Future."""

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def wait(self) -> Chunk:
        """Returns the chunk once it is made; raises the error of the thread that makes it."""
        with self.done:
            if self.chunk is not None:
                return self.chunk
        raise self.error or RuntimeError("the thread that was decoding a chunk ended without a result")


class ChunkCache:
    """Keeps at most `capacity_bytes` of chunks. Thread-safe: each chunk is made by one thread, others wait for it."""

    def __init__(self, *, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_made = 0
        """Number of chunks decoded so far."""
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, Chunk] = OrderedDict()
        self._in_making: dict[ChunkKey, _InMaking] = {}

    def get(self, key: ChunkKey) -> Chunk | None:
        """Returns the chunk if it is in the cache, else None."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
            return chunk

    def get_or_make(self, key: ChunkKey, make: Callable[[], Chunk]) -> Chunk:
        """Returns the chunk from the cache, from a thread that is making it, or from `make()`. Raises its errors."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
                return chunk
            expected = self._in_making.get(key)
            if expected is None:
                mine = self._in_making[key] = _InMaking()
        if expected is not None:
            return expected.wait()
        try:
            mine.chunk = chunk = make()
        except BaseException as error:
            mine.error = error
            raise
        finally:
            with self._lock:
                del self._in_making[key]
                if mine.chunk is not None:
                    self.num_made += 1
                    self._keep(key, mine.chunk)
            mine.done.release()
        return chunk

    def _keep(self, key: ChunkKey, chunk: Chunk) -> None:
        if chunk.num_bytes > self.capacity_bytes:
            return
        while self.used_bytes + chunk.num_bytes > self.capacity_bytes:
            _, oldest = self._chunks.popitem(last=False)
            self.used_bytes -= oldest.num_bytes
        self._chunks[key] = chunk
        self.used_bytes += chunk.num_bytes
