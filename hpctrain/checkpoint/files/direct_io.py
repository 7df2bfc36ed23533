"""Writing past the page cache (O_DIRECT): the disk takes the bytes from memory of ours while more are hashed.

The kernel copies nothing and keeps nothing, so the processor is left to training, and the cache to its data. Measured
on ext4, 512 MiB by two ranks with fsync: 0.30 s instead of 0.76 s, 0.02 s of a core instead of 0.6 s.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.files.full_io import write_fully
from hpctrain.checkpoint.files.huge_pages import in_large_pages
from hpctrain.checkpoint.files.write_buffers import Staging

# Of memory and of file: what filesystems ask of places and lengths. One that asks for more says so (EINVAL).
BLOCK_BYTES = 4096
# Of a write from memory of ours: a large page, from which the kernel writes faster than from small ones. Several are
# under way, since a disk takes its time to answer: with two at a time 512 MiB took 7 % longer.
_PIECE_BYTES = 2 << 20
_FIRST_BYTES = 1 << 19  # of the first ones, so that the disk has work at once
_IN_FLIGHT = 6
# A shorter run costs more as a call of its own than through the cache.
_SHORTEST_BYTES = 1 << 18

_Memory: TypeAlias = NDArray[np.uint8]


def open_uncached(path: Path) -> int | None:
    """One more descriptor of the file, that writes past the cache; None where the system or the filesystem has none."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def write_uncached(
    cached: int, uncached: int, stretches: Iterable[tuple[int, memoryview]], *, staging: Staging
) -> None:
    """Write the stretches, (offset, bytes); not flushed when it returns. Raises OSError.

    cached, uncached: descriptors of the file; what is no whole block, and short runs, go through the cache. No other
    rank may write to the same block at the same time other than through the cache. Views must keep their bytes until
    the call returns, but those in memory that the writer lends through `staging`, which is used again; these, and large
    ones whose memory is aligned as their place in the file, are not even copied.
    """
    with _Writer(cached, uncached) as writer, staging.lent(writer.lend, write_now=writer.end_run):
        for offset, data in stretches:
            writer.put(offset, data)


@dataclass(slots=True)
class _Window:
    """Aligned memory that stands for the file from byte `base` on; bytes `begin` to `end` of the file are filled, those
    of `lent` are filled by whoever asked for their place."""

    memory: _Memory
    base: int = 0
    begin: int = 0
    end: int = 0
    limit: int = 0
    lent: range = range(0)

    def start(self, offset: int, *, num_bytes: int) -> None:
        """num_bytes: from the block's begin on, of the memory, to be used."""
        self.base = offset - offset % BLOCK_BYTES
        self.begin = self.end = offset
        self.limit = self.base + min(num_bytes, len(self.memory))
        self.lent = range(0)

    @property
    def room_bytes(self) -> int:
        return self.limit - self.end

    def place(self, num_bytes: int) -> _Memory:
        """Of the next bytes."""
        at = self.end - self.base
        return self.memory[at : at + num_bytes]

    def holds(self, offset: int, data: memoryview) -> bool:
        """Whether these are the next bytes, and lie at their place."""
        return (
            offset == self.end
            and 0 < data.nbytes <= self.room_bytes
            and _address(data) == _address(self.place(1).data)
        )

    def add(self, data: memoryview) -> None:
        if self.end == self.lent.start:
            self.lent = range(0)  # other bytes came in its place
        # Others may run meanwhile: numpy gives up the interpreter's lock.
        np.copyto(self.place(data.nbytes), np.frombuffer(data, dtype=np.uint8))
        self.end += data.nbytes


@final
class _Writer:
    """Gathers stretches that follow each other in windows, which threads write."""

    def __init__(self, cached: int, uncached: int) -> None:
        self._cached = cached
        self._uncached: int | None = uncached
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="hpctrain-write")
        self._has_threads = True
        self._in_flight: deque[tuple[_Memory | None, Future[None]]] = deque()
        self._free: list[_Memory] = []
        self._window: _Window | None = None
        self._next_bytes = _FIRST_BYTES

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.end_run()
                while self._in_flight:
                    self._wait()
        finally:
            self._threads.shutdown(cancel_futures=True)  # the descriptors are closed after this

    def lend(self, offset: int, num_bytes: int) -> _Memory | None:
        """The place in a window of what is put next, if there is room for all of it."""
        window = self._window_at(offset)
        if num_bytes > window.room_bytes:
            return None
        window.lent = range(offset, offset + num_bytes)
        return window.place(num_bytes)

    def put(self, offset: int, data: memoryview) -> None:
        window = self._window
        if window is not None and window.holds(offset, data):
            window.end += data.nbytes
            return
        if data.nbytes >= _SHORTEST_BYTES and (_address(data) - offset) % BLOCK_BYTES == 0:
            self.end_run()
            self._submit_in_pieces(np.frombuffer(data, dtype=np.uint8), offset=offset)
            return
        while data.nbytes:
            window = self._window_at(offset)
            part = data[: window.room_bytes]
            window.add(part)
            data, offset = data[part.nbytes :], offset + part.nbytes

    def _window_at(self, offset: int) -> _Window:
        """The window to go on in at `offset`, with room."""
        window = self._window
        if window is None or window.end != offset or not window.room_bytes:
            self.end_run()
            window = self._window  # kept, where what it held was short
            if window is None:
                window = self._window = _Window(self._free_memory())
            window.start(offset, num_bytes=self._next_bytes)
        return window

    def end_run(self) -> None:
        """Have what the window holds written now: by a thread, unless that costs more than to do it here."""
        window = self._window
        if window is None:
            return
        base, begin, end = window.base, window.begin, window.end
        if window.lent.start < end < window.lent.stop:
            raise RuntimeError("of memory that was lent only a part was handed over: the rest would be lost")
        if end - begin < _SHORTEST_BYTES:
            write_fully(self._cached, window.memory[begin - base : end - base].data, offset=begin)
            window.start(end, num_bytes=self._next_bytes)
            return
        self._next_bytes = min(2 * self._next_bytes, _PIECE_BYTES)
        self._submit(window.memory, base=base, begin=begin, end=end, is_ours=True)
        self._window = None

    def _submit_in_pieces(self, memory: _Memory, *, offset: int) -> None:
        """Large memory that need not be copied; cut where blocks of the file are, the last piece under 4 MiB."""
        begin, end = offset, offset + len(memory)
        while begin < end:
            cut = begin + _PIECE_BYTES - (begin + _PIECE_BYTES) % BLOCK_BYTES
            stop = cut if end - cut >= _PIECE_BYTES else end
            self._submit(
                memory[begin - offset : stop - offset], base=begin, begin=begin, end=stop, is_ours=False
            )
            begin = stop

    def _submit(self, memory: _Memory, *, base: int, begin: int, end: int, is_ours: bool) -> None:
        while len(self._in_flight) >= _IN_FLIGHT:
            self._wait()
        if self._has_threads:
            try:
                job = self._threads.submit(self._write, memory, base, begin, end)
                self._in_flight.append((memory if is_ours else None, job))
                return
            except RuntimeError:  # no more of them: the interpreter ends, or the system has none
                # It may be queued all the same, and be written once more: this memory is not used again.
                self._has_threads = is_ours = False
        self._write(memory, base, begin, end)
        if is_ours:
            self._free.append(memory)

    def _free_memory(self) -> _Memory:
        """The oldest window's, if that has been written: new memory costs more than to fill it."""
        while not self._free and self._in_flight and self._in_flight[0][1].done():
            self._wait()
        return self._free.pop() if self._free else _pages(_PIECE_BYTES)

    def _wait(self) -> None:
        """Until the oldest is written. Raises what its writing raised."""
        memory, job = self._in_flight.popleft()
        job.result()
        if memory is not None:
            self._free.append(memory)

    def _write(self, memory: _Memory, base: int, begin: int, end: int) -> None:
        """Bytes `begin` to `end` of the file, from memory that stands for the file from `base` on."""
        first, last = -(-begin // BLOCK_BYTES) * BLOCK_BYTES, end - end % BLOCK_BYTES
        done = 0
        if last - first >= _SHORTEST_BYTES:
            done = self._write_blocks(memory[first - base : last - base], offset=first)
        if not done:
            write_fully(self._cached, memory[begin - base : end - base].data, offset=begin)
            return
        write_fully(self._cached, memory[begin - base : first - base].data, offset=begin)
        # After a short write the place need not be a block's.
        write_fully(self._cached, memory[first + done - base : end - base].data, offset=first + done)

    def _write_blocks(self, blocks: _Memory, *, offset: int) -> int:
        """Past the cache; bytes written, perhaps not all, and none where the filesystem asks for larger blocks."""
        uncached = self._uncached  # another thread may find out, too
        if uncached is None:
            return 0
        try:
            return os.pwrite(uncached, blocks.data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._uncached = None
            return 0


def _address(data: memoryview) -> int:
    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _pages(num_bytes: int) -> _Memory:
    """Memory that begins with a page."""
    return np.frombuffer(in_large_pages(num_bytes) or mmap.mmap(-1, num_bytes), dtype=np.uint8)
