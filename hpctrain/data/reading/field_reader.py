"""What all readers of fields share: the request, decoding threads, the open file, cached chunks, names in errors."""

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


ReadTask = Callable[[], None]


def default_threads() -> int:
    """Returns the number of cores of this process, at most 4, since several ranks share a node."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


class DecodeThreads:
    """Runs tasks in at most `num_threads` threads, callers included, or in one per caller if there are more callers.

    The threads end when this object is collected.
    """

    def __init__(self, *, num_threads: int) -> None:
        self.num_threads = num_threads
        self._num_callers = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[ReadTask]) -> None:
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


# Shared by all readers of a field.


# From this size on, one copy per sample costs less than gathering into a buffer and scattering from there.
ROW_COPY_BYTES = 2048


class ReadRequest(NamedTuple):
    """Samples of one field of one shard, and where to copy them.

    Attributes:
        samples: Numbers of the samples within the shard: shape (n,).
        starts: First row of each sample in the HDF5 dataset: shape (n,).
        places: Row of `target` for each sample: shape (n,); None: all rows, in order.
        target: Array to fill: C-contiguous, native-endian, shape (batch, rows per sample, *shape of a row).
        lengths: For ragged fields, array in which the samples' lengths are stored at the same places: int64, shape
            (batch,); else None.
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
    def rows_per_sample(self) -> int:
        return int(self.target.shape[1])

    @property
    def sample_bytes(self) -> int:
        return self.target[:1].nbytes


class FieldReader(Protocol):
    """Interface of what reads one field of one shard. Thread-safe."""

    def begin(self, request: ReadRequest) -> Sequence[ReadTask]:
        """Reads what is cheap to read now, and returns tasks for the rest, to be run in any order by any thread.

        This method and the tasks raise DataError that names shard, field and samples.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldName:
    """Name of a field of a shard, for errors."""

    path: Path
    field: str

    def error(self, samples: NDArray[np.int64] | Sequence[int], reason: object) -> DataError:
        """Returns the error for samples that cannot be read, given by their numbers within the shard (at least one)."""
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
    """Identifies a chunk: shard, field, and index of the chunk in each dimension."""

    shard: int
    field: str
    place: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedChunk:
    """Decoded elements of a chunk, native-endian. For ragged fields also the length of each row, int64."""

    values: NDArray[Any]
    lengths: NDArray[np.int64] | None = None

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (self.lengths.nbytes if self.lengths is not None else 0)


class _InMaking:
    """A chunk that one thread is making while others wait for it.

    There is one object per chunk, so it must cost less than a Future.
    """

    def __init__(self) -> None:
        self.chunk: DecodedChunk | None = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def wait(self) -> DecodedChunk:
        """Returns the chunk once it is made; raises the error of the thread that makes it."""
        with self.done:
            if self.chunk is not None:
                return self.chunk
        raise self.error or RuntimeError("the thread that was decoding a chunk ended without a result")


class ChunkCache:
    """LRU cache of at most `capacity_bytes` bytes of decoded chunks. Thread-safe.

    Each chunk is made by one thread; others that need it wait.
    """

    def __init__(self, *, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_made = 0
        """Number of chunks decoded so far."""
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, DecodedChunk] = OrderedDict()
        self._in_making: dict[ChunkKey, _InMaking] = {}

    def get(self, key: ChunkKey) -> DecodedChunk | None:
        """Returns the chunk if it is in the cache, else None."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
            return chunk

    def get_or_make(self, key: ChunkKey, make: Callable[[], DecodedChunk]) -> DecodedChunk:
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

    def _keep(self, key: ChunkKey, chunk: DecodedChunk) -> None:
        if chunk.num_bytes > self.capacity_bytes:
            return
        while self.used_bytes + chunk.num_bytes > self.capacity_bytes:
            _, oldest = self._chunks.popitem(last=False)
            self.used_bytes -= oldest.num_bytes
        self._chunks[key] = chunk
        self.used_bytes += chunk.num_bytes
