"""Writing past the page cache: the same bytes at the same places, whatever the filesystem makes of it."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.engines.write_engines import write_direct
from hpctrain.checkpoint.files.direct_io import BLOCK_BYTES, Staging, open_uncached
from hpctrain.errors import CheckpointError

FILE_BYTES = 12_000_001
FILL = 0xAB
RESULT_OF_PWRITE = os.pwrite


def pieces(seed: int) -> Iterator[tuple[int, int, bool]]:
    """(offset, number of bytes, whether its memory is aligned as its place): neighbours, gaps, small and large."""
    chance = random.Random(seed)
    offset = chance.choice((0, 1, BLOCK_BYTES, 777))
    while True:
        num_bytes = int(10 ** chance.uniform(0, 6.7))
        if offset + num_bytes > FILE_BYTES:
            return
        yield offset, num_bytes, chance.random() < 0.5
        offset += num_bytes
        if chance.random() < 0.3:
            offset += chance.choice((1, 100, BLOCK_BYTES, 50_000))
        if chance.random() < 0.3:
            offset += -offset % BLOCK_BYTES


def need_a_way_past_the_cache(path: Path) -> None:
    descriptor = open_uncached(path)
    if descriptor is None:
        pytest.skip("this filesystem has no way past the page cache")
    os.close(descriptor)


def memory(data: bytes, *, like: int | None) -> memoryview:
    """The bytes, at an address with the remainder of `like`, or with another."""
    pages = memoryview(mmap.mmap(-1, len(data) + 2 * BLOCK_BYTES))
    begin = like % BLOCK_BYTES if like is not None else 64 + (len(data) % 7)
    pages[begin : begin + len(data)] = data
    return pages[begin : begin + len(data)]


def written(path: Path, *, seed: int) -> tuple[bytes, bytes]:
    """What is in the file, and what should be."""
    path.write_bytes(bytes([FILL]) * FILE_BYTES)
    expected = bytearray([FILL]) * FILE_BYTES
    byte_ranges = []
    for offset, num_bytes, is_aligned in pieces(seed):
        data = np.random.default_rng([seed, offset]).bytes(num_bytes)
        expected[offset : offset + num_bytes] = data
        byte_ranges.append((offset, memory(data, like=offset if is_aligned else None)))
    write_direct(path, iter(byte_ranges), bypass_cache=True)
    return path.read_bytes(), bytes(expected)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_written_is_there_and_nothing_else_has_changed(tmp_path: Path, seed: int) -> None:
    found, expected = written(tmp_path / "file", seed=seed)
    assert found == expected


@pytest.mark.parametrize("seed", range(8))
def test_what_is_joined_in_the_writers_memory_is_written_as_it_was_handed_over(
    tmp_path: Path, seed: int
) -> None:
    """Also in two parts, and with the next ones joined in the same memory once it is written."""
    path, staging = tmp_path / "file", Staging()
    path.write_bytes(bytes([FILL]) * FILE_BYTES)
    expected = bytearray([FILL]) * FILE_BYTES
    lent = 0

    def byte_ranges() -> Iterator[tuple[int, memoryview]]:
        nonlocal lent
        for offset, num_bytes, is_joined in pieces(seed):
            data = np.random.default_rng([seed, offset]).bytes(num_bytes)
            expected[offset : offset + num_bytes] = data
            if not is_joined:
                yield offset, memory(data, like=None)
                continue
            joined = staging.memory_for(offset, num_bytes)
            lent += joined.base is not None
            joined[:] = np.frombuffer(data, dtype=np.uint8)
            for begin, end in ((0, num_bytes // 3), (num_bytes // 3, num_bytes)):
                yield offset + begin, joined[begin:end].data

    write_direct(path, byte_ranges(), bypass_cache=True, staging=staging)
    assert path.read_bytes() == bytes(expected)
    assert staging.memory_for(0, 100).base is None  # the writer's memory is gone
    need_a_way_past_the_cache(path)
    assert lent > 3


def test_a_part_of_what_was_lent_is_refused_before_its_memory_is_used_again(tmp_path: Path) -> None:
    path, staging = tmp_path / "file", Staging()
    path.write_bytes(bytes(FILE_BYTES))
    need_a_way_past_the_cache(path)

    def byte_ranges() -> Iterator[tuple[int, memoryview]]:
        joined = staging.memory_for(0, 400_000)
        yield 0, joined[:100_000].data

    with pytest.raises(RuntimeError, match="only a part of the lent memory"):
        write_direct(path, byte_ranges(), bypass_cache=True, staging=staging)


@pytest.mark.parametrize("like", [None, 10])
def test_large_stretches_do_go_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, like: int | None
) -> None:
    """In pieces; but not structures, which are read back."""
    past, through = [], []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            flags = int(next(line for line in info if line.startswith("flags")).split()[1], 8)
        (past if flags & os.O_DIRECT else through).append(len(data))
        return RESULT_OF_PWRITE(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = np.random.default_rng(0).bytes(9_000_000)
    headers = np.random.default_rng(1).bytes(1_500_000)
    path = tmp_path / "file"
    path.write_bytes(bytes(10 + len(data) + len(headers)))
    write_direct(
        path, [(10, memory(data, like=like))], structure=[(10 + len(data), memoryview(headers))],
        bypass_cache=True,
    )  # fmt: skip
    assert path.read_bytes() == bytes(10) + data + headers
    if not past:
        pytest.skip("this filesystem has no way past the page cache")
    ends = (BLOCK_BYTES - 10) + (len(data) + 10) % BLOCK_BYTES
    assert sum(through) == ends + len(headers)
    assert sum(past) == len(data) - ends
    assert len(past) >= 4
    assert max(past) < 2 * 2**21
    if like is None:  # gathered in windows, of which the first ones are short: the disk has work at once
        assert min(past) < 2**19


@pytest.mark.parametrize("answer", ["refused when opened", "refused when written", "short"])
def test_a_filesystem_that_will_not_have_it_gets_the_bytes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    real_open, uncached = os.open, set()

    def opened(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and answer == "refused when opened":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags & ~os.O_DIRECT, *rest)
        if flags & os.O_DIRECT:
            uncached.add(fd)
        return fd

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if fd in uncached and answer == "refused when written":
            raise OSError(errno.EINVAL, "Invalid argument")
        if fd in uncached:
            data = data[: len(data) // 2 + 1]
        return RESULT_OF_PWRITE(fd, data, offset)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", pwrite)
    found, expected = written(tmp_path / "file", seed=3)
    assert found == expected
    assert bool(uncached) == (answer != "refused when opened")


def test_an_error_in_a_thread_that_writes_is_reported_and_leaves_no_thread(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    data = memory(bytes(9_000_000), like=None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="a limit on file sizes"):
            write_direct(path, [(0, data)], bypass_cache=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("refused", [{1}, {2}, set(range(2, 100))])
def test_a_system_that_has_no_more_threads_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[int]
) -> None:
    real_start, begun = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("hpctrain-write"):
            begun.append(thread.name)
            if len(begun) in refused:
                raise RuntimeError("can't start new thread")
        real_start(thread)

    def slow_pwrite(fd: int, data: memoryview, offset: int) -> int:
        time.sleep(0.01 if len(data) > 1 << 18 else 0)  # so that what was queued all the same is written late
        return RESULT_OF_PWRITE(fd, data, offset)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(os, "pwrite", slow_pwrite)
    data = np.random.default_rng(0).bytes(40 << 20)
    path = tmp_path / "file"
    path.write_bytes(bytes(len(data)))
    whole = memory(data, like=None)
    pieces_of_it = ((at, whole[at : at + (4 << 20)]) for at in range(0, len(data), 4 << 20))
    write_direct(path, pieces_of_it, bypass_cache=True)
    assert path.read_bytes() == data
    assert begun


def test_two_threads_that_are_refused_at_once_both_go_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, attempts = threading.Barrier(2, timeout=300), itertools.count()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            flags = int(next(line for line in info if line.startswith("flags")).split()[1], 8)
        if flags & os.O_DIRECT:
            if next(attempts) < 2:
                both.wait()
            raise OSError(errno.EINVAL, "Invalid argument")
        return RESULT_OF_PWRITE(fd, data, offset)

    data = np.random.default_rng(0).bytes(4 << 20)
    path = tmp_path / "file"
    path.write_bytes(bytes(len(data)))
    descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)  # else there is nothing to be refused
    os.close(descriptor)
    monkeypatch.setattr(os, "pwrite", pwrite)
    write_direct(path, [(0, memory(data, like=None))], bypass_cache=True)
    assert path.read_bytes() == data
