"""Shared by all readers of a field: the request, which selects elements and their destination; the open file; the name
of the field in errors.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError

# Runs decoding tasks in the calling thread and a few others.


Task = Callable[[], None]


def default_threads() -> int:
    """Returns the number of cores of this process, at most 4, since several ranks share a node."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


class DecodeThreads:
    """At most `num_threads` threads, callers included, or one per caller if there are more callers.

    The threads end when this object is collected.
    """

    def __init__(self, *, num_threads: int) -> None:
        self.num_threads = num_threads
        self._num_callers = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs all tasks and waits for them. After an error no other task begins, and the error is raised."""
        queue = deque(tasks)
        errors: list[BaseException] = []

        def work() -> None:
            while queue and not errors:
                try:
                    task = queue.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    task()
                except BaseException as error:
                    errors.append(error)

        with self._lock:
            self._num_callers += 1
            num_others = min(self.num_threads - self._num_callers, len(tasks) - 1)
        others = []
        try:
            if num_others > 0:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(
                        self.num_threads - 1, thread_name_prefix="hpctrain-decode"
                    )
                others = [self._pool.submit(work) for _ in range(num_others)]
            work()
            for other in others:
                # No tasks remain, so one that has not begun is cancelled: the threads may be busy with another gather.
                if not other.cancel():
                    other.result()
        finally:
            with self._lock:
                self._num_callers -= 1
        if errors:
            raise errors[0]


# From this size on, one copy per sample costs less than gathering into a buffer and scattering from there.
ROW_COPY_BYTES = 2048


class Request(NamedTuple):
    """Samples of one field of one shard.

    samples: numbers within the shard, shape (n,). starts: first row of each in the HDF5 dataset, shape (n,).
    places: row of `target` for each sample, shape (n,); None: all rows, in order.
    target: C-contiguous, native-endian, shape (batch, rows per sample, *rest of a row).
    lengths: int64, shape (batch,), filled at the same places for ragged fields; None for others.
    """

    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    places: NDArray[np.int64] | None
    target: NDArray[Any]
    lengths: NDArray[np.int64] | None = None

    @property
    def all_places(self) -> NDArray[np.int64]:
        return np.arange(len(self.starts)) if self.places is None else self.places

    @property
    def rows_a_sample(self) -> int:
        return int(self.target.shape[1])

    @property
    def sample_bytes(self) -> int:
        return self.target[:1].nbytes


class FieldReader(Protocol):
    """Reads one field of one shard. Thread-safe."""

    def begin(self, request: Request) -> Sequence[Task]:
        """Reads what is cheap to read now; returns tasks for the rest, to be run in any order by any thread.

        This method and the tasks raise DataError that names shard, field and samples.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldName:
    """Names a field of a shard in errors."""

    path: Path
    field: str

    def error(self, samples: NDArray[np.int64] | Sequence[int], reason: object) -> DataError:
        """Returns the error to raise. samples: numbers within the shard, at least one."""
        first, last = int(min(samples)), int(max(samples))
        which = f"sample {first}" if first == last else f"samples {first} to {last}"
        return DataError(f"field {self.field!r}, {which} of shard {self.path} cannot be read: {reason}")


@final
class OpenFile:
    """A file opened for reading, closed with the last reference. Raises OSError if it cannot be opened.

    Keep this object, not its descriptor number, which may belong to another file after it was closed.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def close(self) -> None:
        """Closes the file now. May be called more than once."""
        self._close()


# LRU cache of decoded chunks, bounded in bytes.


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
