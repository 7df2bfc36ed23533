"""Direct I/O (O_DIRECT): writes past the page cache from our own memory, while further bytes are hashed.

The kernel neither copies nor caches the bytes, which leaves processor and page cache to the training. Measured on
ext4, 512 MiB by two ranks with fsync: 0.30 s instead of 0.76 s, and 0.02 s of CPU time instead of 0.6 s.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.format.dtypes import byte_view, dtype_named, empty_tensor
from hpctrain.errors import CheckpointError
from hpctrain.storage import write_fully

# Lends the writer's buffer to the code that joins small tensors, which saves a copy. One rank, one thread.


_Memory: TypeAlias = NDArray[np.uint8]
# (offset in the file, number of bytes) -> memory for the next bytes to be written, or None.
Lend: TypeAlias = Callable[[int, int], _Memory | None]


@final
class Staging:
    """Provides memory in which small tensors are joined before they are written.

    While a direct writer (`write_uncached`) is active, this is the writer's own buffer, so that the bytes are not
    copied again. Otherwise it is new memory.
    """

    def __init__(self) -> None:
        self._lend: Lend | None = None

    def memory_for(self, offset: int, num_bytes: int) -> _Memory:
        """Returns uninitialized memory for the bytes of the file at offset `offset`: uint8, shape (num_bytes,).

        The caller fills the memory and passes all of it, or nothing, to the writer of the file, before other bytes and
        before the next call of `memory_for`. Afterwards the caller must not use the memory.
        """
        lent = None if self._lend is None else self._lend(offset, num_bytes)
        return np.empty(num_bytes, dtype=np.uint8) if lent is None else lent

    @contextmanager
    def lent(self, lend: Lend) -> Iterator[None]:
        """Context in which `memory_for` returns memory of a writer, if the writer's function `lend` provides it."""
        self._lend = lend
        try:
            yield
        finally:
            self._lend = None


# Memory for loaded tensors, in huge pages if the kernel provides them.
#
# Allocating a page of 4 KiB takes longer than filling it: reading into new memory is several times as fast
# with pages of 2 MiB.


_LARGE_PAGE_BYTES = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


def fresh_tensor(shape: tuple[int, ...], *, dtype: str) -> torch.Tensor:
    """Returns an uninitialized CPU tensor, in huge pages if it is large.

    Raises CheckpointError if there is not enough memory.
    """
    kind = dtype_named(dtype)
    num_bytes = math.prod(shape) * kind.itemsize
    if num_bytes >= 2 * _LARGE_PAGE_BYTES and kind is not torch.complex32:
        memory = in_large_pages(num_bytes)
        if memory is not None:
            return torch.frombuffer(memory, dtype=kind, count=math.prod(shape)).reshape(shape)
    try:
        return empty_tensor(shape, dtype=dtype) if kind is torch.complex32 else torch.empty(shape, dtype=kind)
    except RuntimeError as error:
        raise CheckpointError(f"there is no memory for a tensor of {num_bytes} bytes: {error}") from error


def in_large_pages(num_bytes: int) -> mmap.mmap | None:
    """Returns at least `num_bytes` bytes of memory in huge pages; None if the system does not support it.

    The kernel is asked to use huge pages for as many as fit into `num_bytes`; the rest stays in small pages.
    """
    if _ADVICE is None:
        return None
    # If its length is a multiple of the huge page, the mapping is also aligned to one (Linux 6.7 and newer).
    length = -(-num_bytes // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    try:
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # for example, too many mappings
        return None
    # If refused, small pages are used. The end, of which only a part is used, stays in small pages.
    with suppress(OSError):
        memory.madvise(_ADVICE, 0, num_bytes // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES)
    return memory


def memory_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns the bytes of a contiguous CPU tensor: uint8, shape (num_bytes,). Shares the tensor's memory."""
    if tensor.dtype is torch.complex32:
        return byte_view(tensor).numpy()  # slower: suppresses torch's warnings about this dtype
    return tensor.reshape(-1).view(torch.uint8).numpy()


# Direct I/O (O_DIRECT).


# Alignment of memory addresses, file offsets and lengths. A filesystem that requires a larger one reports EINVAL.
BLOCK_BYTES = 4096
# Length of a write from our own memory: a huge page, from which the kernel writes faster than from small ones. Several
# writes are in flight to hide the latency of the disk: with two, 512 MiB took 7 % longer.
_PIECE_BYTES = 2 << 20
_FIRST_BYTES = 1 << 19  # length of the first writes: shorter, so that the disk starts early
_IN_FLIGHT = 6
# A shorter direct write takes longer than one through the page cache.
_SHORTEST_BYTES = 1 << 18


def open_uncached(path: Path) -> int | None:
    """Opens the file for direct writes and returns the descriptor; None if system or filesystem do not support it.

    Raises OSError for any other failure.
    """
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
    cached: int, uncached: int, byte_ranges: Iterable[tuple[int, memoryview]], *, staging: Staging
) -> None:
    """Writes byte ranges, (offset, bytes), past the page cache, without flushing them. Raises OSError.

    `cached` and `uncached` are two descriptors of the file. Partial blocks and short runs of bytes are written
    through the page cache. Other ranks that write to the same blocks meanwhile must also write through the page
    cache. A byte range is not copied if it lies in memory lent by `staging`, or if it is large and aligned in
    memory as in the file. The content of a view must not change until the call returns. Only views of lent memory may
    change, since that memory is lent again for later byte ranges.
    """
    with _Writer(cached, uncached) as writer, staging.lent(writer.lend):
        for offset, data in byte_ranges:
            writer.put(offset, data)


@dataclass(slots=True)
class _Window:
    """An aligned buffer for the bytes of a file at offsets `base` to `limit` - 1.

    The buffer contains the bytes at offsets `begin` to `end` - 1 so far. `lent` is the range of offsets whose memory
    `_Writer.lend` lent to a caller, who fills it.
    """

    memory: _Memory
    base: int = 0
    begin: int = 0
    end: int = 0
    limit: int = 0
    lent: range = range(0)

    def start(self, offset: int, *, num_bytes: int) -> None:
        """Makes the buffer empty, for the bytes of the file that begin at `offset`.

        The buffer then holds at most `num_bytes` bytes, counted from the start of the block that contains `offset`.
        """
        self.base = offset - offset % BLOCK_BYTES
        self.begin = self.end = offset
        self.limit = self.base + min(num_bytes, len(self.memory))
        self.lent = range(0)

    @property
    def free_bytes(self) -> int:
        return self.limit - self.end

    def place(self, num_bytes: int) -> _Memory:
        """Returns the part of the buffer into which the next `num_bytes` bytes of the file are to be put."""
        at = self.end - self.base
        return self.memory[at : at + num_bytes]

    def holds(self, offset: int, data: memoryview) -> bool:
        """Returns True if `data` are the next bytes of the file and already lie at their position in the buffer."""
        return (
            offset == self.end
            and 0 < data.nbytes <= self.free_bytes
            and _address(data) == _address(self.place(1).data)
        )

    def add(self, data: memoryview) -> None:
        if self.end == self.lent.start:
            self.lent = range(0)  # other bytes take the place of the lent ones
        # numpy releases the interpreter lock during the copy.
        np.copyto(self.place(data.nbytes), np.frombuffer(data, dtype=np.uint8))
        self.end += data.nbytes


@final
class _Writer:
    """Collects contiguous byte ranges of a file in buffers (windows), which several threads write to the file."""

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
        """Returns the part of the current buffer into which the bytes at file offset `offset` are to be put.

        The part is uint8, shape (num_bytes,). Returns None if the bytes do not fit into the buffer.
        """
        window = self._window_at(offset)
        if num_bytes > window.free_bytes:
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
            part = data[: window.free_bytes]
            window.add(part)
            data, offset = data[part.nbytes :], offset + part.nbytes

    def _window_at(self, offset: int) -> _Window:
        """Returns a buffer that is not full and whose next byte is the one at file offset `offset`."""
        window = self._window
        if window is None or window.end != offset or not window.free_bytes:
            self.end_run()
            window = self._window  # still there if its content was short
            if window is None:
                window = self._window = _Window(self._free_memory())
            window.start(offset, num_bytes=self._next_bytes)
        return window

    def end_run(self) -> None:
        """Makes a thread write the content of the current buffer to the file. Short content is written here."""
        window = self._window
        if window is None:
            return
        base, begin, end = window.base, window.begin, window.end
        if window.lent.start < end < window.lent.stop:
            raise RuntimeError("only a part of the lent memory was passed on: the rest would be lost")
        if end - begin < _SHORTEST_BYTES:
            write_fully(self._cached, window.memory[begin - base : end - base].data, offset=begin)
            window.start(end, num_bytes=self._next_bytes)
            return
        self._next_bytes = min(2 * self._next_bytes, _PIECE_BYTES)
        self._submit(window.memory, base=base, begin=begin, end=end, is_ours=True)
        self._window = None

    def _submit_in_pieces(self, memory: _Memory, *, offset: int) -> None:
        """Makes threads write large aligned memory to the file without copying it, in pieces.

        `offset` is the file offset of the first byte. The pieces have about 2 MiB and end at block boundaries, except
        for the last piece, which is shorter than 4 MiB.
        """
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
            except RuntimeError:  # no new threads: the interpreter is shutting down, or a limit of the system
                # The job may be queued nevertheless and write the memory again, so do not reuse it.
                self._has_threads = is_ours = False
        self._write(memory, base, begin, end)
        if is_ours:
            self._free.append(memory)

    def _free_memory(self) -> _Memory:
        """Returns memory for a buffer: that of a buffer whose content was written, or else new memory.

        Memory is reused since allocating it takes longer than filling it.
        """
        while not self._free and self._in_flight and self._in_flight[0][1].done():
            self._wait()
        return self._free.pop() if self._free else _pages(_PIECE_BYTES)

    def _wait(self) -> None:
        """Waits until the oldest write is done. Raises the error of that write, if there is one."""
        memory, job = self._in_flight.popleft()
        job.result()
        if memory is not None:
            self._free.append(memory)

    def _write(self, memory: _Memory, base: int, begin: int, end: int) -> None:
        """Writes the bytes of the file at offsets `begin` to `end` - 1, which are in `memory`.

        The first byte of `memory` belongs at file offset `base`.
        """
        first, last = -(-begin // BLOCK_BYTES) * BLOCK_BYTES, end - end % BLOCK_BYTES
        done = 0
        if last - first >= _SHORTEST_BYTES:
            done = self._write_blocks(memory[first - base : last - base], offset=first)
        if not done:
            write_fully(self._cached, memory[begin - base : end - base].data, offset=begin)
            return
        write_fully(self._cached, memory[begin - base : first - base].data, offset=begin)
        # After a short write the position need not be at a block boundary.
        write_fully(self._cached, memory[first + done - base : end - base].data, offset=first + done)

    def _write_blocks(self, blocks: _Memory, *, offset: int) -> int:
        """Writes whole blocks past the page cache at file offset `offset`, and returns the number of bytes written.

        The number may be less than the length of `blocks`, and is 0 if the filesystem requires larger blocks.
        """
        uncached = self._uncached  # another thread may reset it
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
    """Returns page-aligned memory: uint8, shape (at least num_bytes,)."""
    return np.frombuffer(in_large_pages(num_bytes) or mmap.mmap(-1, num_bytes), dtype=np.uint8)


# System calls that Python lacks and that speed up writing a large file. All are optional.
#
# Measured on ext4, 512 MiB by two ranks with fsync: 0.41 s without them, 0.28 s with preallocation and
# early writeback.


_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start, do not wait
_NOT_THERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@functools.cache
def _call(name: str) -> Callable[..., int] | None:
    """Returns the C library's function with this name; None if it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype = ctypes.c_int
    return function


def allocate(fd: int, *, num_bytes: int) -> None:
    """Sets the length of an empty file and allocates its disk space, if the filesystem supports that. Raises OSError.

    So a full disk is detected before writing, and the bytes of several ranks are contiguous on disk. This function
    does not use posix_fallocate, which writes every block if the filesystem does not support allocation.
    """
    if num_bytes:
        _fallocate(fd, num_bytes=num_bytes)
    os.ftruncate(fd, num_bytes)


def begin_writing_back(fd: int, *, offset: int, num_bytes: int) -> None:
    """Makes the kernel start to write `num_bytes` bytes at file offset `offset` from the page cache to disk.

    Does not wait. The later fsync reports errors.
    """
    sync_file_range = _call("sync_file_range")
    if sync_file_range is not None:
        sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), ctypes.c_uint(_WRITE))


def _fallocate(fd: int, *, num_bytes: int) -> None:
    """Calls fallocate(2), if the system and the filesystem support it. Raises OSError."""
    fallocate = _call("fallocate")
    while fallocate is not None:
        if fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) == 0:
            return
        code = ctypes.get_errno()
        if code in _NOT_THERE:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
