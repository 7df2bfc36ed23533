"""Makes items in threads, before the consumer asks for them: in order, bounded in number and in bytes.

The items are made in threads, not in processes: forked workers under MPI hang or corrupt data (pytorch#13787,
horovod#2898), and copying samples from a memory map releases the interpreter lock for most of the time. Transforms,
which hold the lock, can run in worker processes (`hpctrain.data.transforms.worker_pool`); the threads then wait for the
processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hpctrain.data.format.manifest import Manifest
from hpctrain.data.loading.batch import Batch
from hpctrain.data.order.epoch_order import Order, PositionRange
from hpctrain.data.order.order_spec import BlockOrder
from hpctrain.data.reading.dataset import Dataset

T = TypeVar("T")

# How long to wait for a thread that is still making an item that nobody needs, since it may hang.
_ENDING_MAY_TAKE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteBound(Generic[T]):
    """Limit on the total size of the items that are ready or being made. One item is always allowed.

    If an item is larger than all earlier items, the items that are already being made may exceed the limit by the
    difference. No further item is begun until the total with that item is within the limit again.

    Attributes:
        max_bytes: The limit, in bytes.
        num_bytes: Function that returns the size of a finished item in bytes.
        expected_bytes: Upper bound on the size of an item in bytes. None if the size is unknown before an item is
            made: then the first item is made alone, and each later item is expected to be as large as the largest
            so far.
        making_bytes: Additional bytes that an item needs while it is being made, such as the input of a transform.
    """

    max_bytes: int
    num_bytes: Callable[[T], int]
    expected_bytes: int | None = None
    making_bytes: int = 0


class _Shared(Generic[T]):
    """State that a `Prefetch` shares with its threads.

    This object has no reference to the `Prefetch`, so that the `Prefetch` can be garbage-collected while threads run.
    """

    def __init__(
        self, make: Callable[[int], T], *, num_items: int, depth: int | None, bound: ByteBound[T] | None
    ) -> None:
        self.make = make
        self.num_items = num_items
        self.condition = threading.Condition()
        self.depth = num_items if depth is None else max(1, depth)
        self.bound = bound
        self.largest_bytes = bound.expected_bytes if bound is not None else 0  # None: still unknown
        self.held_bytes: dict[int, int] = {}  # item -> bytes, from when it is begun until it is taken
        self.total_bytes = 0  # sum of held_bytes
        self.next_item = 0
        self.ready: dict[int, T | BaseException] = {}
        self.stopped = False

    def _reserve_bytes(self) -> int:
        """Returns the number of bytes that count towards the memory limit while the next item is being made."""
        if self.bound is None:
            return 0
        return self.bound.making_bytes + (self.largest_bytes or 0)

    def _fits(self) -> bool:
        if not self.held_bytes:
            return True
        if len(self.held_bytes) >= self.depth or self.largest_bytes is None:
            return False
        if self.bound is None:
            return True
        return self.total_bytes + self._reserve_bytes() <= self.bound.max_bytes

    def _hold(self, number: int, num_bytes: int) -> None:
        self.total_bytes += num_bytes - self.held_bytes.get(number, 0)
        self.held_bytes[number] = num_bytes

    def claim(self) -> int | None:
        """Waits until the memory limit allows to make the next item, and returns the index of that item.

        Returns None if no item remains to be made, or after `stop`.
        """
        with self.condition:
            while not self.stopped and self.next_item < self.num_items and not self._fits():
                self.condition.wait()
            return self._claim_now()

    def _claim_now(self) -> int | None:
        """Returns the index of the next item to make, or None if the memory limit does not allow to make it now.

        Also returns None if no item remains, or after `stop`. The caller must hold the lock.
        """
        if self.stopped or self.next_item >= self.num_items or not self._fits():
            return None
        self._hold(self.next_item, self._reserve_bytes())
        self.next_item += 1
        return self.next_item - 1

    def put(self, number: int, item: T | BaseException) -> None:
        """Stores the item of index `number`, or the error that was raised while it was made. See `take`."""
        num_bytes = 0
        if self.bound is not None and not isinstance(item, BaseException):
            num_bytes = self.bound.num_bytes(item)
        with self.condition:
            if not self.stopped:
                self.ready[number] = item
                self._hold(number, num_bytes)
                self.largest_bytes = max(self.largest_bytes or 0, num_bytes)
            self.condition.notify_all()

    def take(self, number: int, *, help_make: bool) -> T | BaseException:
        """Waits for the item of index `number` and returns it, or the error that was raised while it was made.

        With `help_make`, this thread makes items while it waits. Raises StopIteration after `stop`.
        """
        while True:
            with self.condition:
                if number in self.ready:
                    self.total_bytes -= self.held_bytes.pop(number)
                    self.condition.notify_all()
                    return self.ready.pop(number)
                if self.stopped:
                    raise StopIteration
                claimed = self._claim_now() if help_make else None
                if claimed is None:
                    self.condition.wait()
                    continue
            try:
                item: T | BaseException = self.make(claimed)
            except Exception as error:  # raised later, in place of item `claimed`
                item = error
            except BaseException:  # Ctrl-C is raised now
                self.stop()
                raise
            self.put(claimed, item)
            del item  # an error refers to this frame: the cycle would keep everything here alive

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            self.ready.clear()
            self.condition.notify_all()


def _work(shared: _Shared[T]) -> None:
    while (number := shared.claim()) is not None:
        try:
            item: T | BaseException = shared.make(number)
        except BaseException as error:  # passed to the consumer, which waits for this number
            item = error
        shared.put(number, item)
        del item


class MakingThreads:
    """The threads with which a `Prefetch` makes items in advance.

    This object has no reference to the `Prefetch`, so that the `Prefetch` can be garbage-collected while threads run.
    """

    def __init__(self, shared: _Shared[Any], threads: list[threading.Thread]) -> None:
        self._shared = shared
        self._threads = threads

    @property
    def have_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def unfinished(self) -> list[threading.Thread]:
        """Returns the threads that are still making an item although the iteration has ended."""
        return [thread for thread in self._threads if self._shared.stopped and thread.is_alive()]


def _end(shared: _Shared[T], threads: list[threading.Thread]) -> None:
    """Tells the threads to stop, and waits for them for at most `_ENDING_MAY_TAKE_S` seconds."""
    shared.stop()
    # The garbage collector may run in one of the threads, which cannot join itself.
    if threading.current_thread() not in threads:
        until_s = time.monotonic() + _ENDING_MAY_TAKE_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))


class Prefetch(Generic[T]):
    """Iterator over make(0), ..., make(num_items - 1). Threads call `make` before the items are requested.

    At most `depth` items are ready or being made at any time. `bound` limits their total size in bytes. An exception of
    `make` is raised when its item is requested, and ends the iteration. `close()` stops the threads and waits up to 5 s
    for them. `close()` is also called at the end of a `with` block, and when the iterator is garbage-collected. With
    `help_make`, a thread that waits for an item makes items itself. This uses one more core, and items made in this
    thread need not be passed between threads.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        *,
        num_items: int,
        depth: int | None = None,
        bound: ByteBound[T] | None = None,
        num_threads: int = 1,
        help_make: bool = False,
    ) -> None:
        self._next = 0
        self._help_make = help_make
        self._shared = _Shared(make, num_items=num_items, depth=depth, bound=bound)
        self._threads = [
            threading.Thread(target=_work, args=(self._shared,), name=f"hpctrain-data-{number}", daemon=True)
            for number in range(min(max(1, num_threads), num_items))
        ]
        self.threads = MakingThreads(self._shared, self._threads)
        # Runs once: on close(), when this iterator is collected, or before the interpreter shuts down (later
        # a daemon thread could be frozen while it holds the lock).
        self._finalizer = weakref.finalize(self, _end, self._shared, self._threads)
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._next >= self._shared.num_items or self._shared.stopped:
            self.close()
            raise StopIteration
        item = self._shared.take(self._next, help_make=self._help_make)
        self._next += 1
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Stops the threads and waits up to 5 s for them. May be called more than once.

        Afterwards `threads.unfinished` returns the threads that are still running.
        """
        self._finalizer()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InStep(Generic[T]):
    """Iterator over make(0), make(1), ...: the interface of `Prefetch`, but without threads."""

    def __init__(self, make: Callable[[int], T], *, num_items: int) -> None:
        self._make = make
        self._num_items = num_items
        self._next = 0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._next >= self._num_items:
            raise StopIteration
        try:
            item = self._make(self._next)
        except BaseException:
            self.close()
            raise
        self._next += 1
        return item

    def close(self) -> None:
        """Ends the iteration."""
        self._num_items = 0


# The batches of one epoch for one rank: made ahead by threads, or in lockstep where all ranks read
# together.


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlan:
    """The global batches of an epoch that a rank reads. Pure.

    Attributes:
        order: Maps positions in the epoch to samples.
        start: Position of the first batch, in samples over all ranks.
        every: With the value n the rank reads only each n-th global batch.
        global_batch: Number of samples of all ranks in one batch.
        num_batches: Number of batches that the rank reads.
    """

    order: Order
    start: int
    every: int
    global_batch: int
    num_batches: int

    def span(self, number: int) -> PositionRange:
        """Returns the range of positions in the epoch that make up the batch of index `number`.

        The last batch of an epoch may be shorter.
        """
        first = self.start + number * self.every * self.global_batch
        return PositionRange(first, min(first + self.global_batch, self.order.num_samples))


class EpochIterator:
    """Iterator over one rank's batches of one epoch. A `with` block stops the threads that make batches at its end."""

    def __init__(
        self,
        source: Prefetch[Batch] | InStep[Batch],
        *,
        num_batches: int,
        waited: Callable[[float], None],
        handed_out: Callable[[Batch], None],
        watched: Callable[[int], AbstractContextManager[None]],
        closed: Callable[[], None],
    ) -> None:
        """Do not call this; use `Loader.epoch`.

        `source` makes the batches. `waited` is called with the seconds that a call of `next` waited for its batch.
        `handed_out` is called with each batch before `next` returns that batch. `watched` takes the index of a batch
        and returns the context in which `next` waits for that batch. `closed` is called at the first `close`, after
        the threads were stopped.
        """
        self._source = source
        self._waited = waited
        self._handed_out = handed_out
        self._watched = watched
        self._closed = closed
        self._is_closed = False
        self._next = 0
        self.last_wait_s = 0.0
        """Seconds that the last call of `next` waited for its batch."""
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __len__(self) -> int:
        return self.num_batches

    def __next__(self) -> Batch:
        with self._watched(self._next):
            began = time.perf_counter()
            batch = next(self._source)
            self.last_wait_s = time.perf_counter() - began
        self._waited(self.last_wait_s)
        self._next += 1
        self._handed_out(batch)
        return batch

    def close(self) -> None:
        """Stops the threads that make batches, and waits up to 5 s for them. May be called more than once."""
        self._source.close()
        if not self._is_closed:
            self._is_closed = True
            self._closed()

    def __enter__(self) -> EpochIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Asks the kernel to read whole blocks ahead for a block order: large reads, in the background.
#
# The samples of a window are scattered over its blocks, and reading them one by one would be small reads.
# So when the epoch enters a window, posix_fadvise(WILLNEED) requests the blocks of the next window, which
# are then in the page cache when their samples are read. This is only a hint: nothing waits for it, and
# errors of it are ignored.


# The kernel limits each hint to the readahead size of the device, which is 128 KiB by default.
_HINT_BYTES = 128 << 10


class CachedRange(NamedTuple):
    """A byte range of one of the dataset's files."""

    file: str
    offset: int
    num_bytes: int


class ReadAhead:
    """Asks the kernel to read data into the page cache before it is needed (posix_fadvise). Thread-safe.

    It is used with an order that reads blocks of consecutive samples, mixed within windows of several blocks
    (`BlockOrder`). One object serves one epoch of one loader, from position `start` on.
    """

    def __init__(self, dataset: Dataset, *, order: BlockOrder, start: int = 0) -> None:
        self._directory = dataset.directory
        self._manifest = dataset.manifest
        self._order = order
        self._first_samples = np.cumsum([0, *(shard.samples for shard in dataset.manifest.shards)])
        self._next_window = next(iter(order.windows_of(start, min(start + 1, order.num_samples))), 0)
        self._lock = threading.Lock()

    def before(self, span: PositionRange) -> None:
        """Asks the kernel to read ahead for the samples at positions `span` of the epoch.

        Requests the windows (groups of sample blocks that are mixed) that contain these positions, and the window after
        them. Windows that were requested before are left out. Call this method before the samples at `span` are read.
        """
        reached = self._order.windows_of(*span)
        if not reached:
            return
        with self._lock:
            # Threads may call this out of order: the first caller requests all windows up to its own.
            first = self._next_window
            wanted = range(first, max(first, min(reached.stop + 1, self._order.num_windows)))
            self._next_window = wanted.stop
        for window in wanted:
            _ask(self._directory, list(self.byte_ranges(window)))

    def byte_ranges(self, window: int) -> Iterator[CachedRange]:
        """Yields the byte ranges of the samples of a window, for the fields that are contiguous in the files. Pure.

        `window` is the index of a window, a group of sample blocks that are mixed with each other.
        """
        for block in self._order.blocks_of(window):
            shard = int(np.searchsorted(self._first_samples, block.start, side="right")) - 1
            while shard < len(self._manifest.shards) and self._first_samples[shard] < block.stop:
                first = int(self._first_samples[shard])
                rows = PositionRange(max(block.start - first, 0), block.stop - first)
                yield from _rows_in(self._manifest, shard=shard, rows=rows)
                shard += 1


def read_ahead_for(dataset: object, order: Order, *, start: int = 0) -> ReadAhead | None:
    """Returns an object that reads ahead for an epoch, from position `start` on, or None if that cannot help.

    Reading ahead helps only if `order` is a `BlockOrder`, and not for token windows that must not cross the start of a
    document.
    """
    if not isinstance(dataset, Dataset) or not isinstance(order, BlockOrder) or dataset.manifest.is_split:
        return None
    return ReadAhead(dataset, order=order, start=start)


def _rows_in(manifest: Manifest, *, shard: int, rows: PositionRange) -> Iterator[CachedRange]:
    entry = manifest.shards[shard]
    rows = PositionRange(rows.start, min(rows.stop, entry.samples))
    for name, stored in entry.fields.items():
        spec = manifest.fields[name]
        if stored.offset is None or spec.kind != "array":
            continue
        sample_bytes = step = spec.sample_bytes
        skipped = 0 if stored.whole else stored.first_row * sample_bytes
        if manifest.tokens is not None:
            itemsize = np.dtype(spec.dtype).itemsize
            step, skipped = manifest.tokens.stride * itemsize, stored.first_row * itemsize
        num_bytes = (rows.num_samples - 1) * step + sample_bytes
        yield CachedRange(entry.file, stored.offset + skipped + rows.start * step, num_bytes)


def _ask(directory: Path, byte_ranges: list[CachedRange]) -> None:
    for file, parts in itertools.groupby(sorted(byte_ranges), key=lambda byte_range: byte_range.file):
        with contextlib.suppress(OSError):  # the read that follows reports the error
            descriptor = os.open(directory / file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for part in parts:
                    if _is_cached(descriptor, part):
                        continue
                    for done in range(0, part.num_bytes, _HINT_BYTES):
                        os.posix_fadvise(
                            descriptor, part.offset + done, min(_HINT_BYTES, part.num_bytes - done),
                            os.POSIX_FADV_WILLNEED,
                        )  # fmt: skip
            finally:
                os.close(descriptor)


def _is_cached(descriptor: int, part: CachedRange) -> bool:
    """Returns True if the first, the middle and the last byte of `part` are in the page cache.

    `part` is a byte range of the file with the given descriptor. Returns False if the filesystem cannot tell.
    """
    byte = bytearray(1)
    try:
        for place in (0, part.num_bytes // 2, part.num_bytes - 1):
            os.preadv(descriptor, [byte], part.offset + place, os.RWF_NOWAIT)
    except OSError:  # BlockingIOError: not in the cache
        return False
    return True
