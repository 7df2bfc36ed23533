"""Makes HDF5 files whose contiguous datasets have a fixed place, and whose chunks are written as encoded.

A contiguous dataset allocated early and never filled has its place in the file from the start
(`dataset.id.get_offset()`): it can then be written with pwrite and read through a memory map, and the file
stays ordinary HDF5. h5py is imported when it is first needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.data.hdf5.encode import Chunks

if TYPE_CHECKING:
    import h5py

_PAGE_BYTES = 4096
_PROBE_BYTES = 1 << 16
# HDF5's index of chunks: an entry of at most 24 + 8 * 9 bytes, in nodes that are at least half full.
_INDEX_BYTES_A_CHUNK = 256


def create(
    path: Path,
    *,
    datasets: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    chunked: Mapping[str, Chunks] | None = None,
) -> dict[str, int]:
    """Make an HDF5 file with contiguous, allocated, unfilled datasets; returns each one's offset in the file.

    datasets: name -> (shape, dtype). Datasets of a page or more begin on a page boundary; one that holds
    nothing has no offset. chunked: datasets that are written whole, compressed as they come.
    Raises OSError.
    """
    import h5py

    chunked = chunked or {}
    contiguous = sum(int(np.prod(s, dtype=np.int64)) * d.itemsize for s, d in datasets.values())
    encoded = sum(c.num_bytes + _INDEX_BYTES_A_CHUNK * len(c.encoded) for c in chunked.values())
    _probe(path, num_bytes=contiguous + encoded)
    offsets = {}
    with h5py.File(path, "w", alignment_threshold=_PAGE_BYTES, alignment_interval=_PAGE_BYTES) as file:
        for name, (shape, dtype) in datasets.items():
            offset = _create_contiguous(file, name, shape=shape, dtype=dtype)
            if offset is not None:
                offsets[name] = int(offset)
            elif 0 not in shape:
                raise OSError(f"HDF5 gave dataset {name!r} of shape {shape} no place in {path}")
        for name, chunks in chunked.items():
            dataset = file.create_dataset(
                name, shape=chunks.shape, dtype=chunks.dtype, track_times=False, **chunks.filters
            )
            rest = (0,) * (len(chunks.shape) - 1)
            for number, data in enumerate(chunks.encoded):
                dataset.id.write_direct_chunk((number * chunks.chunk[0], *rest), data)
    return offsets


def _create_contiguous(
    file: h5py.File, name: str, *, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> int | None:
    import h5py

    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # Without times in the headers, packing the same samples twice gives the same files.
    plist.set_obj_track_times(False)
    kind = h5py.h5t.py_create(dtype, logical=True)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), plist)
    offset: int | None = dataset.get_offset()
    return offset


def _probe(path: Path, *, num_bytes: int) -> None:
    """Meet a full disk, a quota or a limit on file sizes here, as an OSError.

    HDF5 (1.10.8 seen) that cannot write a file when it closes it goes on holding it, and crashes the process
    later. What it writes of the file here is headers, and chunks that are counted in `num_bytes`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, num_bytes + _PROBE_BYTES)
        os.pwrite(descriptor, b"\1" * _PROBE_BYTES, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
