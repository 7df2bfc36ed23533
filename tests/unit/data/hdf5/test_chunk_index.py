"""The index of chunks that is read from the file: what HDF5 says, or nothing."""

from __future__ import annotations

import os
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data.hdf5.chunk_index import ChunkIndex, read_chunk_index
from hpctrain.data.hdf5.layout import RowReader, inspect

VALUES = np.random.default_rng(0).integers(0, 9, (3000, 8, 6), dtype=np.uint8)


def index_of(path: Path, name: str = "x") -> ChunkIndex | None:
    reader = RowReader(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_chunk_index(
            descriptor,
            header=reader.header_offset(name),
            layout=inspect(path, names=[name])[name],
            base=reader.user_block_bytes,
        )
    finally:
        os.close(descriptor)
        reader.close()


def compare(path: Path, name: str = "x") -> int:
    """Every chunk is where HDF5 says. Returns how many are stored."""
    index = index_of(path, name)
    assert index is not None
    with h5py.File(path, "r", locking=False) as file:
        dataset = file[name]
        stored = [dataset.id.get_chunk_info(number) for number in range(dataset.id.get_num_chunks())]
        for info in stored:
            numbers = tuple(o // c for o, c in zip(info.chunk_offset, dataset.chunks, strict=True))
            assert index.place(numbers) == (info.byte_offset, info.size, info.filter_mask)
    assert sum(offset >= 0 for offset in index.offsets) == len(stored)
    return len(stored)


@pytest.mark.parametrize("libver", ["earliest", ("v108", "v110")])
@pytest.mark.parametrize("chunks", [(1, 8, 6), (16, 8, 6), (7, 3, 5)])
def test_every_chunk_is_where_hdf5_says(tmp_path: Path, libver: Any, chunks: tuple[int, ...]) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file.create_dataset("x", data=VALUES, chunks=chunks, compression="gzip")
    assert compare(tmp_path / "a.h5") == np.prod(
        [-(-n // c) for n, c in zip(VALUES.shape, chunks, strict=True)]
    )


def test_chunks_that_were_never_written_or_cut_off_and_a_header_in_several_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    for libver in ("earliest", ("v108", "v110")):
        with h5py.File(path, "w", libver=libver) as file:
            dataset = file.create_dataset(
                "group/x",
                (3000, 8, 6),
                maxshape=(None, 8, 6),
                chunks=(2, 8, 6),
                dtype="f4",
                compression="lzf",
            )
            dataset[100:300] = 1
            dataset.id.write_direct_chunk((400, 0, 0), bytes(8 * 12 * 4), filter_mask=1)
            for number in range(50):
                dataset.attrs[f"note {number}"] = np.arange(number)
            dataset.resize(420, axis=0)
        assert compare(path, "group/x") == 101
        with h5py.File(path, "w", libver=libver) as file:
            file.create_dataset("x", (10, 8), chunks=(2, 8), dtype="f4")
        assert compare(path) == 0


def test_behind_a_user_block(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=1024) as file:
        file.create_dataset("x", data=VALUES, chunks=(1, 8, 6), compression="gzip")
    index = index_of(path)
    assert index is not None
    place = index.place((1234, 0, 0))
    assert place is not None
    stored = path.read_bytes()[place.offset : place.offset + place.num_bytes]
    assert zlib.decompress(stored) == VALUES[1234].tobytes()


def test_other_indexes_and_too_many_chunks_are_left_to_hdf5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "new.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=VALUES, chunks=(1, 8, 6))
    assert index_of(tmp_path / "new.h5") is None
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(1, 8, 6))
    monkeypatch.setattr("hpctrain.data.hdf5.chunk_index.MAX_CHUNKS", 2999)
    assert index_of(tmp_path / "a.h5") is None


def test_a_damaged_index_ends_in_nothing_or_in_places_within_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES[:300], chunks=(1, 8, 6), compression="gzip")
    header = RowReader(path).header_offset("x")
    layout = inspect(path, names=["x"])["x"]
    content = path.read_bytes()
    chance, unknown = random.Random(0), 0
    nodes = [place for place in range(len(content)) if content.startswith(b"TREE\x01", place)]
    assert len(nodes) > 5
    for _ in range(400):
        damaged = bytearray(content)
        begin = chance.choice([header, *nodes])
        for _ in range(chance.choice((1, 4))):
            damaged[begin + chance.randrange(300)] = chance.randrange(256)
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(damaged)) :]
        (tmp_path / "b.h5").write_bytes(damaged)
        descriptor = os.open(tmp_path / "b.h5", os.O_RDONLY)
        index = read_chunk_index(descriptor, header=header, layout=layout)
        os.close(descriptor)
        unknown += index is None
        if index is not None:
            for offset, size in zip(index.offsets, index.sizes, strict=True):
                assert offset == -1 or 0 <= offset <= offset + size <= len(damaged)
    assert 50 < unknown < 400


def test_nodes_that_refer_to_the_same_ones_over_and_over_are_given_up(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES[:300], chunks=(1, 8, 6), compression="gzip")
    reader = RowReader(path)
    header = reader.header_offset("x")
    reader.close()
    layout = inspect(path, names=["x"])["x"]
    content = bytearray(path.read_bytes())
    nodes = [place for place in range(len(content)) if content.startswith(b"TREE\x01", place)]
    child = next(place for place in nodes if content[place + 5] == 0)
    for level in range(1, 8):
        node = struct.pack("<4sBBHQQ", b"TREE", 1, level, 64, 2**64 - 1, 2**64 - 1)
        node += 64 * struct.pack("<II4QQ", 10, 0, 0, 0, 0, 0, child)
        child = len(content)
        content += node
    root = struct.pack("<Q", next(place for place in nodes if content[place + 5] == 1))
    place = content.index(root, header)
    content[place : place + 8] = struct.pack("<Q", child)
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    assert read_chunk_index(descriptor, header=header, layout=layout) is None
    os.close(descriptor)
