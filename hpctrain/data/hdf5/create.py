"""Creates HDF5 files with contiguous datasets at known offsets, and with chunks that are already encoded.

If a contiguous dataset is allocated early and never filled, it has an offset in the file at once
(`dataset.id.get_offset()`). It can then be written with pwrite and read through a memory map, and the file remains
ordinary HDF5. h5py is imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.data.hdf5.filters import Chunks

if TYPE_CHECKING:
    import h5py

_PAGE_BYTES = 4096
_PROBE_BYTES = 1 << 16
# Chunk index of HDF5: entries of at most 24 + 8 * 9 bytes, in nodes that are at least half full.
_INDEX_BYTES_A_CHUNK = 256


def create(
    path: Path,
    *,
    datasets: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    chunked: Mapping[str, Chunks] | None = None,
) -> dict[str, int]:
    """Creates an HDF5 file with contiguous datasets that are allocated but not filled. Returns their file offsets.

    `datasets` maps the name of each contiguous dataset to its shape and dtype. A dataset of at least one page (4 KiB)
    begins on a page boundary. An empty dataset has no offset. `chunked` maps the name of each chunked dataset to its
    encoded chunks, which are written as they are. Raises OSError if the file cannot be written, also if the disk is
    full.
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
                raise OSError(f"HDF5 did not allocate dataset {name!r} of shape {shape} in {path}")
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
    # No times in the headers, so that packing the same samples twice makes identical files.
    plist.set_obj_track_times(False)
    kind = h5py.h5t.py_create(dtype, logical=True)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), plist)
    offset: int | None = dataset.get_offset()
    return offset


def _probe(path: Path, *, num_bytes: int) -> None:
    """Raises OSError if a disk, a quota or a file size limit has no room for a little more than `num_bytes` bytes.

    To find out, makes the file at `path` that large, before HDF5 writes to it. If HDF5 (seen with 1.10.8) cannot write
    a file when it closes the file, it keeps the file open and crashes the process later. `num_bytes` includes the
    chunks that HDF5 writes; apart from these it writes only headers.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, num_bytes + _PROBE_BYTES)
        os.pwrite(descriptor, b"\1" * _PROBE_BYTES, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
