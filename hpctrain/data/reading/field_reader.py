"""Parts that all field readers use: the request, decoding threads, the open file, the chunk cache, error messages."""

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
    """Runs tasks in at most `num_threads` threads, which include the threads that call `run`.

    If more than `num_threads` threads call `run` at once, each runs its own tasks alone. The additional threads end
    when this object is garbage-collected.
    """

    def __init__(self, *, num_threads: int) -> None:
        self.num_threads = num_threads
        self._num_callers = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[ReadTask]) -> None:
        """Runs all tasks and waits for them. After an error no further task begins, and the first error is raised."""
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
    """Samples of one field of one shard, and the array rows into which they are copied.

    Attributes:
        samples: Indices of the samples within the shard: shape (n,).
        starts: Index of the first row of each sample in the HDF5 dataset: shape (n,).
        places: Row of `target` for each sample: shape (n,). None: all rows of `target` are filled, in order.
        target: Array to fill: C-contiguous, native-endian, shape (batch, rows per sample, *shape of a row).
        lengths: For ragged fields, array to fill with the lengths of the samples, in the rows `places`: int64, shape
            (batch,). None for other fields.
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
    """Interface of a class that reads one field of one shard. Thread-safe."""

    def begin(self, request: ReadRequest) -> Sequence[ReadTask]:
        """Reads the samples that are cheap to read, and returns tasks that read the remaining samples.

        The tasks may be run in any order by any thread. This method and the tasks raise DataError that names shard,
        field and samples.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldName:
    """Path of a shard and name of a field, for error messages."""

    path: Path
    field: str

    def error(self, samples: NDArray[np.int64] | Sequence[int], reason: object) -> DataError:
        """Returns the error for samples that cannot be read.

        `samples` are the indices of these samples within the shard, at least one.
        """
        first, last = int(min(samples)), int(max(samples))
        which = f"sample {first}" if first == last else f"samples {first} to {last}"
        return DataError(f"field {self.field!r}, {which} of shard {self.path} cannot be read: {reason}")


@final
class OpenFile:
    """A file opened for reading. Raises OSError if the file cannot be opened.

    The file is closed when the last reference to this object is deleted. Keep this object rather than its descriptor:
    after the file is closed, the same descriptor may belong to another file.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def close(self) -> None:
        """Closes the file now. May be called more than once."""
        self._close()


# LRU cache of decoded chunks, bounded in bytes.


class ChunkKey(NamedTuple):
    """Key of a chunk in the cache: index of the shard, name of the field, and index of the chunk per dimension."""

    shard: int
    field: str
    place: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedChunk:
    """Decoded elements of a chunk, native-endian. For ragged fields, `lengths` is the length of each row, int64."""

    values: NDArray[Any]
    lengths: NDArray[np.int64] | None = None

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (self.lengths.nbytes if self.lengths is not None else 0)


class _InMaking:
    """A chunk that one thread is decoding while other threads wait for it.

    One such object is created per chunk, so it must cost less than a `concurrent.futures.Future`.
    """

    def __init__(self) -> None:
        self.chunk: DecodedChunk | None = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def wait(self) -> DecodedChunk:
        """Waits until the chunk is decoded and returns it. Raises the error that the decoding thread raised, if any."""
        with self.done:
            if self.chunk is not None:
                return self.chunk
        raise self.error or RuntimeError("the thread that was decoding a chunk ended without a result")


class ChunkCache:
    """LRU cache of at most `capacity_bytes` bytes of decoded chunks. Thread-safe.

    Each chunk is decoded by one thread. Other threads that need the same chunk wait until it is decoded.
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
        """Returns the chunk from the cache, from another thread that is decoding it, or from `make()`.

        Raises the errors of `make`.
        """
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
