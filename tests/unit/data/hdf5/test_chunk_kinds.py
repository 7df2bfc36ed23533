"""Each kind of chunk index that HDF5 writes, with the unlimited dimensions everywhere: read as HDF5 reads it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from hpctrain.data import Dataset, IndexReading, SampleIs, index_files, verify_dataset
from hpctrain.data.hdf5.chunk_index import ChunkAccess, _Reader, read_chunk_access
from hpctrain.data.hdf5.layout import RowReader, inspect

SHAPE, CHUNKS = (7, 6, 10), (2, 4, 3)
DATA = np.arange(1, 421, dtype=np.float32).reshape(SHAPE)
V1_B_TREE, SINGLE, IMPLICIT, FIXED_ARRAY, EXTENSIBLE_ARRAY, V2_B_TREE = range(6)
LATEST = ("v110", "latest")


class Case(NamedTuple):
    """kind: of the index that HDF5 makes. grows: dimensions without a limit."""

    kind: int
    grows: tuple[int, ...] = ()
    libver: Any = LATEST
    chunks: tuple[int, ...] = CHUNKS
    early: bool = False


EVERYWHERE = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
CASES = [
    *(Case(V1_B_TREE, grows, libver="earliest") for grows in [(), *EVERYWHERE]),
    Case(SINGLE, chunks=SHAPE),
    Case(IMPLICIT, early=True),
    Case(FIXED_ARRAY),
    *(Case(EXTENSIBLE_ARRAY, grows) for grows in EVERYWHERE[:3]),
    *(Case(EXTENSIBLE_ARRAY, grows, chunks=SHAPE) for grows in EVERYWHERE[:3]),
    *(Case(V2_B_TREE, grows) for grows in EVERYWHERE[3:]),
]


def make(file: h5py.File, case: Case, *, filters: str, written: str) -> None:
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_chunk(case.chunks)
    plist.set_fill_value(np.array([-5], dtype=np.float32))
    if case.early:
        plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    if "gzip" in filters:
        plist.set_shuffle()
        plist.set_deflate(1)
    if "checked" in filters:
        plist.set_fletcher32()
    if "unfiltered border" in filters:
        # H5Pset_chunk_opts, which h5py has no function for: chunks at the border are stored without filters.
        assert ctypes.CDLL(h5p.__file__).H5Pset_chunk_opts(ctypes.c_int64(plist.id), ctypes.c_uint(2)) == 0
    limits = tuple(h5s.UNLIMITED if dim in case.grows else size for dim, size in enumerate(SHAPE))
    space = h5s.create_simple(SHAPE, limits)
    h5d.create(file.id, b"x", h5t.IEEE_F32LE, space, plist)
    dataset = file["x"]
    if written == "all":
        dataset[...] = DATA
    elif written == "some":
        dataset[2:4, 1:6, 4:9] = DATA[2:4, 1:6, 4:9]
    elif written == "resized":
        grown = tuple(size + 5 if dim in case.grows else size for dim, size in enumerate(SHAPE))
        dataset.resize(grown)
        dataset[...] = np.arange(np.prod(grown), dtype=np.float32).reshape(grown)
        dataset.resize(
            tuple(max(1, size - 3) if dim in case.grows else size for dim, size in enumerate(SHAPE))
        )


def kind_of(path: Path) -> int:
    """Kind of index, from the data layout message."""
    reader, descriptor = RowReader(path), os.open(path, os.O_RDONLY)
    layout = inspect(path, names=["x"])["x"]
    raw = _Reader(descriptor, base=reader.user_block_bytes, layout=layout)
    content, _ = raw.layout_message(reader.header_offset("x"))
    os.close(descriptor)
    reader.close()
    return V1_B_TREE if content[0] == 3 else content[5 + content[3] * content[4]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_are_read_as_hdf5_reads_them(tmp_path: Path, case: Case) -> None:
    filters = ["none"] if case.kind == IMPLICIT else ["none", "gzip checked"]
    for number, (filtered, written, block) in enumerate(
        (filtered, written, block)
        for filtered in filters
        for written in ("all", "some", "nothing", "resized")
        for block in (0, 512)
    ):
        path, out = tmp_path / f"{number}.h5", tmp_path / f"index {number}"
        with h5py.File(path, "w", libver=case.libver, userblock_size=block) as file:
            make(file, case, filters=filtered, written=written)
        assert kind_of(path) == case.kind
        with h5py.File(path, "r") as file:
            wanted = file["x"][...]
        index_files(out, files=[str(path)], fields="x=/x", reading=IndexReading.CONTENT)
        for io in ("map", "read"):
            dataset = Dataset.open(out, io=io)
            order = np.arange(len(wanted))[::-1]
            assert np.array_equal(dataset.gather(order)["x"], wanted[order]), (filtered, written, block)
        assert not verify_dataset(out)


def test_more_chunks_than_are_looked_up_one_by_one(tmp_path: Path) -> None:
    data = np.arange(15_000, dtype=np.int32).reshape(3, 5000)
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        for name, limits in {
            "first": (None, 5000),
            "last": (3, None),
            "both": (None, None),
            "no": (3, 5000),
        }.items():
            file.create_dataset(name, data=data, maxshape=limits, chunks=(1, 3), shuffle=True)
    for name in ("first", "last", "both", "no"):
        index_files(tmp_path / name, files=[str(tmp_path / "a.h5")], fields=f"x=/{name}")
        found = Dataset.open(tmp_path / name).gather(np.array([2, 0, 1]))["x"]
        assert np.array_equal(found, data[[2, 0, 1]])


@pytest.mark.parametrize("grows", [(), (0,), (2,), (0, 1)])
def test_chunks_at_the_border_that_are_stored_without_filters(tmp_path: Path, grows: tuple[int, ...]) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        make(file, Case(-1, grows), filters="gzip, unfiltered border", written="all")
    reader, descriptor = RowReader(path), os.open(path, os.O_RDONLY)
    access = read_chunk_access(
        descriptor,
        header=reader.header_offset("x"),
        layout=inspect(path, names=["x"])["x"],
        base=0,
        first_is_unlimited=0 in grows,
    )
    os.close(descriptor)
    reader.close()
    assert access is ChunkAccess.VALUES
    index_files(tmp_path / "out", files=[str(path)], fields="x=/x")
    assert np.array_equal(Dataset.open(tmp_path / "out").gather(np.arange(7))["x"], DATA)


def test_one_sample_a_file_and_a_chunk_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", data=DATA[0], maxshape=(6, None), chunks=(1, 10), compression="gzip")
    index_files(tmp_path / "rows", files=[str(path)], fields="x=/x")
    dataset = Dataset.open(tmp_path / "rows", cache_bytes=0)
    assert np.array_equal(dataset.gather(np.array([5, 0]))["x"], DATA[0][[5, 0]])
    index_files(tmp_path / "file", files=[str(path)], fields="x=/x", samples=SampleIs.FILE)
    assert np.array_equal(Dataset.open(tmp_path / "file").gather(np.array([0]))["x"][0], DATA[0])


@pytest.mark.parametrize("block", [0, 512, 4096])
@pytest.mark.parametrize("early", [False, True])
def test_contiguous_datasets_that_were_never_written_are_the_fill_value(
    tmp_path: Path, block: int, early: bool
) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=block) as file:
        plist = h5p.create(h5p.DATASET_CREATE)
        plist.set_fill_value(np.array([3], dtype=np.float32))
        plist.set_alloc_time(h5d.ALLOC_TIME_EARLY if early else h5d.ALLOC_TIME_LATE)
        for name in ("x", "y"):
            h5d.create(file.id, name.encode(), h5t.IEEE_F32LE, h5s.create_simple((7, 4)), plist)
        file["y"][2:4] = 1
    index_files(tmp_path / "out", files=[str(path)], fields="x=/x,y=/y", reading=IndexReading.CONTENT)
    batch = Dataset.open(tmp_path / "out").gather(np.arange(7))
    assert (batch["x"] == 3).all()
    assert (batch["y"][2:4] == 1).all()
    assert (batch["y"][4:] == 3).all()
    assert not verify_dataset(tmp_path / "out")
