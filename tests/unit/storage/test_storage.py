"""Filesystem types, full reads and writes, files that are replaced as a whole, even splits."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st

from hpctrain.storage import (
    Filesystem,
    filesystem_of,
    part_of,
    read_up_to,
    replace_file,
    split_evenly,
    write_fully,
)
from hpctrain.storage.filesystem_type import on_mount

MOUNTS = [
    ("/", "ext4"), ("/home", "autofs"), ("/home", "nfs4"), ("/lustre/my scratch", "lustre"),
    ("/gluster", "fuse.glusterfs"), ("/gluster/local", "tmpfs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/", "ext4", False),
        ("/var/run", "ext4", False),
        ("/home/me", "nfs4", True),
        ("/homes/me", "ext4", False),
        ("/lustre/my scratch/run", "lustre", True),
        ("/gluster", "fuse.glusterfs", True),
        ("/gluster/local/run", "tmpfs", False),
    ],
)
def test_the_innermost_and_last_mount_says_what_filesystem_a_path_is_on(
    path: str, kind: str, shared: bool
) -> None:
    found = on_mount(MOUNTS, path=Path(path))
    assert found == kind
    assert Filesystem(kind=kind).is_shared is shared


def test_a_directory_that_is_not_there_yet_is_on_its_parents_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert filesystem_of(tmp_path / "not" / "yet") == filesystem_of(tmp_path)
    assert filesystem_of(Path("/dev/shm/checkpoints")).kind == "tmpfs"
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
    assert filesystem_of(tmp_path).is_shared  # unknown: to be tried out


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:5]], at))
    data = bytes(range(100))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_fully(fd, memoryview(data), offset=3)
    buffer = bytearray(100)
    assert read_up_to(fd, memoryview(buffer), offset=3) == 100
    assert buffer == data
    assert read_up_to(fd, memoryview(buffer), offset=90) == 13
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="wrote 0 bytes"):
        write_fully(fd, memoryview(data), offset=0)
    os.close(fd)


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    reader = path.open()
    replace_file(path, b"new", partial=tmp_path / ".partial", durable=durable)
    assert (reader.read(), path.read_text()) == ("old", "new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]
    reader.close()


@given(num=st.integers(0, 1000), num_parts=st.integers(1, 50))
def test_parts_are_even_and_cover_all(num: int, num_parts: int) -> None:
    lengths = split_evenly(num, num_parts=num_parts)
    assert sum(lengths) == num
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    parts = [part_of(num, part=part, num_parts=num_parts) for part in range(num_parts)]
    assert [last - first for first, last in parts] == lengths
    assert [first for first, _ in parts[1:]] == [last for _, last in parts[:-1]]
