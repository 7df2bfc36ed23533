"""A checkpoint file without its content: HDF5's own structures, and the file offsets of the content.

The HDF5 library creates it once per layout, in a sparse temporary file; a save then writes these bytes and the content
with plain writes. So a save neither spends time in the library nor depends on its behaviour on a slow or full
filesystem. h5py is imported only here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.checkpoint.files.io_errors import reason_of
from hpctrain.checkpoint.format.commit_header import FORMAT_VERSION, SEAL_BYTES
from hpctrain.checkpoint.format.dtypes import is_raw, storage_dtype
from hpctrain.checkpoint.format.link_names import MAX_NAME_BYTES, TENSOR_GROUP
from hpctrain.errors import CheckpointError


def gaps_between(taken: Iterable[tuple[int, int]], *, file_bytes: int) -> list[tuple[int, int]]:
    """Returns (begin, end) of each gap, ascending. taken: the used byte ranges (offset, length), in any order.

    Raises CheckpointError if two byte ranges overlap, or one extends beyond the end of the file.
    """
    gaps, position = [], 0
    for offset, num_bytes in [*sorted(taken), (file_bytes, 0)]:
        if offset < position:
            raise CheckpointError(f"two byte ranges in the file overlap at byte {offset}")
        if offset > position:
            gaps.append((position, offset))
        position = offset + num_bytes
    return gaps


METADATA_DATASET = "metadata"
# Large datasets are aligned to pages, or to stripes of the filesystem.
ALIGNMENT_BYTES = 4096
_ALIGN_FROM_BYTES = 1 << 16
# HDF5's object headers are collected in blocks of this size instead of lying between the tensors, so that one write
# covers neighbouring small tensors.
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 12, 1 << 20
_HEADER_BYTES = 400  # approximate size of a dataset's object header


@dataclass(frozen=True, kw_only=True, slots=True)
class SkeletonDataset:
    """A dataset of the file. path: its HDF5 path. dtype: torch's name of it. num_bytes: length of its content."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Skeleton:
    """offsets: file offsets of the datasets' content, 0 for empty ones. byte_ranges: all other byte ranges, as (offset,
    bytes), except the main file's commit header and metadata. structure_hash: hash of these byte ranges."""

    offsets: tuple[int, ...]
    metadata_offset: int
    metadata_bytes: int
    file_bytes: int
    byte_ranges: tuple[tuple[int, bytes], ...]
    structure_hash: str


def make_skeleton(
    datasets: Sequence[SkeletonDataset], *, metadata_bytes: int = 0, user_block: bytes = b"",
    alignment: int = ALIGNMENT_BYTES,
) -> Skeleton:  # fmt: skip
    """Creates the skeleton of one file. Not collective.

    Contiguous datasets that are allocated early and never filled have a fixed file offset (H5Dget_offset), so that
    their content can be written without HDF5.
    metadata_bytes: space for the main file's metadata; 0 for part files. user_block: the first SEAL_BYTES bytes of a
    part file. Raises CheckpointError if HDF5 cannot represent a dataset, h5py is missing, or the temporary folder is
    full.
    """
    h5py = _import_h5py()
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        path = Path(folder) / "skeleton.h5"
        with _hdf5_errors(path):
            _try_out(
                path, num_bytes=metadata_bytes + sum(d.num_bytes for d in datasets), headers=len(datasets)
            )
        with _hdf5_errors(path), h5py.File(path, "w", **_file_options(len(datasets), alignment)) as file:
            group = file.create_group(TENSOR_GROUP)
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_layout(h5py.h5d.CONTIGUOUS)
            creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            offsets = tuple(_create(h5py, group, dataset, creation) for dataset in datasets)
            metadata_offset = 0
            if metadata_bytes:
                space = h5py.h5s.create_simple((metadata_bytes,))
                kind = h5py.h5t.NATIVE_UINT8
                made = h5py.h5d.create(file.id, METADATA_DATASET.encode(), kind, space, creation)
                metadata_offset = int(made.get_offset())
            file.attrs["hpctrain_format"] = FORMAT_VERSION
        return _take_apart(
            path, datasets, offsets=offsets, metadata=(metadata_offset, metadata_bytes), user_block=user_block
        )


def _try_out(path: Path, *, num_bytes: int, headers: int) -> None:
    """Raises OSError if the filesystem has no space for the skeleton: HDF5 does not survive a full disk."""
    with open(path, "wb") as file:
        file.write(bytes(_HEADER_BYTES * headers + _MAX_BLOCK_BYTES))
        file.truncate(max(num_bytes, file.tell()))
    path.unlink()


def _file_options(num_datasets: int, alignment: int) -> dict[str, Any]:
    """Returns the options of h5py.File. The object headers of HDF5 1.8 are smaller and faster than the oldest format,
    and HDF5 1.10 can read everything."""
    block = 1 << max(0, num_datasets * _HEADER_BYTES - 1).bit_length()
    return {
        "libver": ("v108", "v110"),
        "locking": False,
        "userblock_size": SEAL_BYTES,
        "alignment_threshold": max(_ALIGN_FROM_BYTES, alignment),
        "alignment_interval": alignment,
        "meta_block_size": min(max(block, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES),
    }


def _create(h5py: Any, group: Any, dataset: SkeletonDataset, creation: Any) -> int:
    link = dataset.path.rpartition("/")[2].encode()
    if len(link) > MAX_NAME_BYTES:
        raise CheckpointError(f"a tensor's name is {len(link)} bytes long, the limit is {MAX_NAME_BYTES}")
    if len(dataset.shape) > 32:
        raise CheckpointError(f"{dataset.path} has {len(dataset.shape)} dimensions, HDF5 has at most 32")
    space = h5py.h5s.create_simple(dataset.shape) if dataset.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5py.h5t.py_create(storage_dtype(dataset.dtype), logical=True)
    made = h5py.h5d.create(group.id, link, kind, space, creation)
    if is_raw(dataset.dtype):
        h5py.Dataset(made).attrs["torch_dtype"] = dataset.dtype
    return int(made.get_offset()) if dataset.num_bytes else 0


def _take_apart(
    path: Path, datasets: Sequence[SkeletonDataset], *, offsets: tuple[int, ...], metadata: tuple[int, int],
    user_block: bytes,
) -> Skeleton:  # fmt: skip
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        file_bytes = os.fstat(fd).st_size
        taken = [(o, d.num_bytes) for o, d in zip(offsets, datasets, strict=True) if d.num_bytes]
        if user_block:
            os.pwrite(fd, user_block, 0)
        else:
            taken += [(0, SEAL_BYTES), metadata]
        byte_ranges = tuple(
            (begin, os.pread(fd, end - begin, begin))
            for begin, end in gaps_between(taken, file_bytes=file_bytes)
        )
    finally:
        os.close(fd)
    return Skeleton(
        offsets=offsets,
        metadata_offset=metadata[0],
        metadata_bytes=metadata[1],
        file_bytes=file_bytes,
        byte_ranges=byte_ranges,
        structure_hash=structure_hash(byte_ranges),
    )


def structure_hash(byte_ranges: Iterable[tuple[int, bytes]]) -> str:
    """Returns the hash of HDF5's structures of a file. byte_ranges: (offset, bytes), ascending."""
    digest = xxhash.xxh3_64()
    for _, data in byte_ranges:
        digest.update(data)
    return digest.hexdigest()


@contextmanager
def _hdf5_errors(path: Path) -> Iterator[None]:
    """Converts the various exception types of HDF5 errors to CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"cannot create the HDF5 structures of a checkpoint in {path.parent}: {reason}"
        ) from error


def _import_h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise CheckpointError(f"saving a checkpoint needs h5py: {error}") from error
    return h5py
