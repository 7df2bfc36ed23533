"""Inspects HDF5 files: finds the offsets of datasets and chunks, and reads rows through h5py if that is needed.

Files are made by `create`. h5py is imported on first use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.hdf5.read_elements import read_elements
from hpctrain.data.hdf5.stored_type import describe, dtype_of, has_numpys_bytes
from hpctrain.errors import DataError


def class_texts(values: NDArray[Any] | Any) -> list[str]:
    """Returns one str per element of `values`, strings as h5py reads them (bytes or str, fixed or variable length).

    Raises UnicodeDecodeError (a ValueError) if bytes are not UTF-8.
    """
    flat = np.atleast_1d(np.asarray(values)).reshape(-1)
    return [value.decode("utf-8") if isinstance(value, bytes) else str(value) for value in flat.tolist()]


if TYPE_CHECKING:
    import h5py


class Filter(NamedTuple):
    """One step of a dataset's filter pipeline: its registered number, and its parameters."""

    code: int
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetLayout:
    """One HDF5 dataset: shape, dtype of its elements as h5py reads them, and location of its bytes.

    The dimensions of an array type are the last ones of shape. dtype: of a compound, with the members that numpy can
    hold. offset: first byte in the file; None if it is not contiguous (chunked, compressed, compact, external, never
    written), or its elements are not stored as numpy's. chunks: shape of a chunk, None if it is not chunked.
    filters: in the order of writing. only_hdf5: the stored chunks must not be read without HDF5, since it converts
    their elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None
    chunks: tuple[int, ...] | None = None
    filters: tuple[Filter, ...] = ()
    only_hdf5: bool = False

    @property
    def num_chunks(self) -> int:
        """Number of chunks, including partial chunks at the borders."""
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunks or (), strict=False))


def _open(path: Path) -> h5py.File:
    import h5py

    try:
        # Shards do not change, and locks do not work on many filesystems of clusters.
        return h5py.File(path, "r", locking=False)
    except (ValueError, TypeError):  # this HDF5 does not support the option
        return h5py.File(path, "r")
    except OSError as error:
        if "locking flag" in str(error):  # this process has it open already, with locks
            return h5py.File(path, "r")
        raise


def inspect(path: Path, *, names: Sequence[str]) -> dict[str, DatasetLayout]:
    """Returns the layouts of the named datasets of a file; leaves out names that do not exist.

    Raises OSError if it is not a complete HDF5 file, DataError if a name is a link, or is not a dataset in this file.
    """
    import h5py

    layouts = {}
    with _open(path) as file:
        for name in names:
            link = file.get(name, getlink=True)
            if link is None:
                continue
            if not isinstance(link, h5py.HardLink):
                raise DataError(f"{name!r} in {path} is a soft or external link, not a dataset of this file")
            dataset = file[name]
            if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
                raise DataError(f"{name!r} in {path} is not a dataset with samples")
            if dataset.file.filename != file.filename:
                raise DataError(f"{name!r} in {path} is in another file, {dataset.file.filename}")
            layout = layout_of(dataset)
            if layout is None:
                kind = describe(dataset.id.get_type())
                raise DataError(f"{name!r} in {path} holds {kind}, which numpy does not have")
            layouts[name] = layout
    return layouts


def layout_of(dataset: h5py.Dataset) -> DatasetLayout | None:
    """Returns the layout of a dataset; None if numpy has no dtype for its elements."""
    import h5py

    kind, plist = dataset.id.get_type(), dataset.id.get_create_plist()
    dtype = dtype_of(kind)
    if dtype is None:
        return None
    shape, is_array = tuple(dataset.shape), dtype.subdtype is not None
    if dtype.subdtype is not None:
        dtype, more = dtype.subdtype
        shape += more
    is_plain = has_numpys_bytes(kind, dtype)
    offset, chunks = None, None
    if plist.get_layout() == h5py.h5d.CONTIGUOUS and plist.get_external_count() == 0 and is_plain:
        offset = _offset(dataset)
    elif plist.get_layout() == h5py.h5d.CHUNKED:
        chunks = (*plist.get_chunk(), *shape[len(dataset.shape) :])
    filters = []
    for number in range(plist.get_nfilters()):
        code, _, values, _ = plist.get_filter(number)
        filters.append(Filter(code, tuple(values)))
    return DatasetLayout(
        shape=shape,
        dtype=dtype,
        offset=offset,
        chunks=chunks,
        filters=tuple(filters),
        only_hdf5=not is_plain or is_array,
    )


def _offset(dataset: h5py.Dataset) -> int | None:
    """Returns the file offset of a contiguous dataset; None if it has no place in the file, since it was never written.

    HDF5 1.10 adds the size of the user block to its mark for "no place" too, which then looks like an offset.
    """
    import h5py

    if dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
        return None
    offset: int | None = dataset.id.get_offset()
    return offset


def hdf5_lock() -> AbstractContextManager[object]:
    """Returns the lock that h5py holds while it calls HDF5; a thread that has it may take it again.

    For functions of the low-level interface: h5py 3.14 and older do not take it in read_direct_chunk, and threads that
    read chunks then got errors, or ended the process.
    """
    from h5py._objects import phil

    lock: AbstractContextManager[object] = phil
    return lock


class RowReader:
    """Reads datasets of one file through h5py, if they cannot be read directly. Raises OSError if it cannot be opened.

    The HDF5 library lets one thread in at a time: h5py serialises its calls with a lock. Must not be used after a fork.
    """

    def __init__(self, path: Path, *, opened: h5py.File | None = None) -> None:
        """opened: the same file, already open; `close` closes it."""
        self._file = _open(path) if opened is None else opened
        self.user_block_bytes = int(self._file.userblock_size)
        self._datasets: dict[str, h5py.Dataset] = {}

    def _dataset(self, name: str) -> h5py.Dataset:
        dataset = self._datasets.get(name)
        if dataset is None:
            dataset = self._datasets[name] = self._file[name]
        return dataset

    def rows(self, name: str, *, start: int, stop: int, member: str | None = None) -> NDArray[Any]:
        """Returns rows start, ..., stop - 1 of dataset `name`, or of a member of its compound type.

        Raises MissingFilter or OSError.
        """
        dataset = self._dataset(name)
        if not dataset.shape:  # one element of an array type, whose first dimension has the rows
            return self.whole(name, member=member)[start:stop]
        array: NDArray[Any] = read_elements(dataset, slice(start, stop), member=member)
        return array

    def whole(self, name: str, *, member: str | None = None) -> NDArray[Any]:
        """Returns all elements of dataset `name`, which may be a scalar. Raises MissingFilter or OSError."""
        return np.asarray(read_elements(self._dataset(name), member=member))

    def chunk_place(self, name: str, *, first: tuple[int, ...]) -> ChunkPlace | None:
        """Returns the location of the chunk whose first element is `first`; None if it was never written.

        Only for `ChunkAccess.PLACES`. HDF5 1.10 searches all chunks of the dataset for it.
        Raises OSError or RuntimeError.
        """
        with hdf5_lock():
            info = self._dataset(name).id.get_chunk_info_by_coord(first)
        if info.byte_offset is None:
            return None
        return ChunkPlace(int(info.byte_offset), int(info.size), int(info.filter_mask))

    def stored_chunk(self, name: str, *, first: tuple[int, ...]) -> tuple[int, bytes]:
        """Returns (filter mask, bytes as stored) of that chunk, found in the file's index. Raises OSError."""
        with hdf5_lock():
            mask, data = self._dataset(name).id.read_direct_chunk(first)
        return int(mask), data

    def header_offset(self, name: str) -> int:
        """Returns the offset of the dataset's object header in bytes, relative to the end of the user block."""
        import h5py

        with hdf5_lock():
            return int(h5py.h5o.get_info(self._dataset(name).id).addr)

    def first_is_unlimited(self, name: str) -> bool:
        """Returns whether the first dimension of a dataset may grow without a limit."""
        return self._dataset(name).maxshape[:1] == (None,)

    def chunk(self, name: str, *, first: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        """Returns the elements of a chunk as HDF5 reads them; zeros for its part outside the dataset.

        first: index of its first element. shape: of a chunk. Raises MissingFilter or OSError.
        """
        dataset = self._dataset(name)
        inside = tuple(
            slice(begin, min(begin + size, extent))
            for begin, size, extent in zip(first, shape, dataset.shape, strict=True)
        )
        found: NDArray[Any] = read_elements(dataset, inside)
        values = np.zeros(shape, dtype=found.dtype.newbyteorder("="))
        values[tuple(slice(0, size) for size in found.shape)] = found
        return values

    def close(self) -> None:
        self._datasets.clear()
        self._file.close()


class ChunkPlace(NamedTuple):
    """One stored chunk: offset in the file, size in bytes, and a mask with a bit for each filter that was skipped."""

    offset: int
    num_bytes: int
    filter_mask: int
