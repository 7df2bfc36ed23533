"""Looks into HDF5 files: where datasets and chunks lie, and rows through h5py where that is needed.

Making files is in `create`. h5py is imported when it is first needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.hdf5.read_elements import read_elements
from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py


class Filter(NamedTuple):
    """One step of a dataset's filter pipeline: its number at the HDF Group, and its parameters."""

    code: int
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetLayout:
    """One HDF5 dataset: shape, dtype as stored, and where its bytes are.

    offset: first byte in the file; None if it has no one place (chunked, compressed, compact, external).
    chunks: shape of a chunk, None if it is not chunked. filters: in the order of writing.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None
    chunks: tuple[int, ...] | None = None
    filters: tuple[Filter, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole extent, at its borders also those that are cut."""
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunks or (), strict=False))


def _open(path: Path) -> h5py.File:
    import h5py

    try:
        # Shards do not change, and many file systems of clusters have no working locks.
        return h5py.File(path, "r", locking=False)
    except (ValueError, TypeError):  # an HDF5 that cannot choose
        return h5py.File(path, "r")
    except OSError as error:
        if "locking flag" in str(error):  # this process has it open already, with locks
            return h5py.File(path, "r")
        raise


def inspect(path: Path, *, names: Sequence[str]) -> dict[str, DatasetLayout]:
    """The layouts of the named datasets of a file; a name that the file does not hold is left out.

    Raises OSError if it is no whole HDF5 file, DataError for a name that leads out of the file.
    """
    import h5py

    layouts = {}
    with _open(path) as file:
        for name in names:
            link = file.get(name, getlink=True)
            if link is None:
                continue
            if not isinstance(link, h5py.HardLink):
                raise DataError(f"{name!r} in {path} is a link to elsewhere, not a dataset of this file")
            dataset = file[name]
            if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
                raise DataError(f"{name!r} in {path} is no dataset with samples")
            if dataset.file.filename != file.filename:
                raise DataError(f"{name!r} in {path} lies in another file, {dataset.file.filename}")
            layouts[name] = _layout(dataset)
    return layouts


def _layout(dataset: h5py.Dataset) -> DatasetLayout:
    import h5py

    plist = dataset.id.get_create_plist()
    kind, offset, chunks = plist.get_layout(), None, None
    if kind == h5py.h5d.CONTIGUOUS and plist.get_external_count() == 0 and not dataset.dtype.hasobject:
        offset = dataset.id.get_offset()
    elif kind == h5py.h5d.CHUNKED:
        chunks = tuple(plist.get_chunk())
    filters = []
    for number in range(plist.get_nfilters()):
        code, _, values, _ = plist.get_filter(number)
        filters.append(Filter(code, tuple(values)))
    return DatasetLayout(
        shape=tuple(dataset.shape),
        dtype=dataset.dtype,
        offset=offset,
        chunks=chunks,
        filters=tuple(filters),
    )


class RowReader:
    """The datasets of one open file through h5py: for what cannot be read at its place in the file.

    h5py serialises its calls with a lock of its own. Not to be used after a fork.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open(path)
        self.user_block_bytes = int(self._file.userblock_size)
        self._datasets: dict[str, h5py.Dataset] = {}

    def _dataset(self, name: str) -> h5py.Dataset:
        dataset = self._datasets.get(name)
        if dataset is None:
            dataset = self._datasets[name] = self._file[name]
        return dataset

    def rows(self, name: str, *, start: int, stop: int, member: str | None = None) -> NDArray[Any]:
        """Rows start, ..., stop - 1 of dataset `name`, or of a member of its compound.

        Raises MissingFilter, OSError.
        """
        array: NDArray[Any] = read_elements(self._dataset(name), slice(start, stop), member=member)
        return array

    def whole(self, name: str, *, member: str | None = None) -> NDArray[Any]:
        """All of dataset `name`, as it may also be a scalar. Raises MissingFilter, OSError."""
        return np.asarray(read_elements(self._dataset(name), member=member))

    def chunk_place(self, name: str, *, first: tuple[int, ...]) -> ChunkPlace | None:
        """Where the chunk whose first element is `first` is stored; None if it never was: it is all fill.

        HDF5 1.10 looks through all chunks of the dataset for it. Raises OSError, RuntimeError.
        """
        info = self._dataset(name).id.get_chunk_info_by_coord(first)
        if info.byte_offset is None:
            return None
        return ChunkPlace(int(info.byte_offset), int(info.size), int(info.filter_mask))

    def stored_chunk(self, name: str, *, first: tuple[int, ...]) -> tuple[int, bytes]:
        """(filter mask, bytes as stored) of that chunk, found in the file's index. Raises OSError."""
        mask, data = self._dataset(name).id.read_direct_chunk(first)
        return int(mask), data

    def header_offset(self, name: str) -> int:
        """Where the dataset's object header is, in bytes behind the user block."""
        import h5py

        return int(h5py.h5o.get_info(self._dataset(name).id).addr)

    def fill_value(self, name: str) -> Any:
        """What elements are that were never written."""
        return self._dataset(name).fillvalue

    def close(self) -> None:
        self._datasets.clear()
        self._file.close()


class ChunkPlace(NamedTuple):
    """One stored chunk: its first byte in the file, its bytes, and a bit for each filter left out."""

    offset: int
    num_bytes: int
    filter_mask: int
