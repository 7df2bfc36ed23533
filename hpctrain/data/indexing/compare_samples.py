"""Compares samples that are read without HDF5 with the same samples read by HDF5, when a file is indexed.

hpctrain reads contiguous datasets and chunks directly at their offsets in the file. HDF5 states these offsets, and is
known to state wrong offsets. If the samples differ, training would read other numbers than every other program.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.hdf5.filters import can_undo
from hpctrain.data.hdf5.layout import DatasetLayout, RowReader, read_elements
from hpctrain.data.reading.chunked import StoredChunks
from hpctrain.data.reading.field_reader import OpenFile
from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py

# Share of the time of indexing that comparisons of further files may take; measured with 10,000 files.
_SHARE = 0.005
# Bytes of a row of a contiguous dataset that are compared.
_COMPARED_BYTES = 1 << 16


class _Structure(NamedTuple):
    """How an HDF5 dataset is stored. Datasets that are stored in the same way have the same faults of HDF5.

    `file` contains the size of the file's user block in bytes, and the version of its superblock.
    """

    dtype: str
    chunks: tuple[int, ...] | None
    unlimited: tuple[bool, ...]
    filters: tuple[int, ...]
    file: tuple[int, int]


class SampleComparison:
    """Compares rows of datasets that are read without HDF5 with what HDF5 reads, while a rank indexes files.

    The first, a middle and the last row of a dataset are compared. The first of all datasets that are stored in the
    same way (`_Structure`) is always compared. Other datasets are compared only as long as comparisons have taken at
    most 0.5% of the time.
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._spent_s = 0.0
        self._seen: set[_Structure] = set()
        self.num_compared = 0
        self._file_structure = (0, 0)

    def begin_file(self, file: h5py.File) -> None:
        """Records the format of an open file: size of the user block, version of the superblock.

        Call this for each file before its datasets are compared.
        """
        plist = file.id.get_create_plist()
        self._file_structure = (int(plist.get_userblock()), int(plist.get_version()[0]))

    def compare(self, dataset: h5py.Dataset, *, layout: DatasetLayout, where: str) -> None:
        """Compares rows of an open dataset as read with and without HDF5. Raises DataError if a row differs.

        `where` is the name of the dataset for the message. Does nothing if the dataset is read through HDF5 anyway, or
        if HDF5 cannot read the rows.
        """
        is_chunked = layout.chunks is not None and not layout.only_hdf5 and can_undo(layout.filters)
        if 0 in layout.shape or (layout.offset is None and not is_chunked):
            return
        start = time.perf_counter()
        structure = _Structure(
            dtype=layout.dtype.str,
            chunks=layout.chunks,
            unlimited=tuple(size is None for size in dataset.maxshape) if is_chunked else (),
            filters=tuple(each.code for each in layout.filters),
            file=self._file_structure,
        )
        if structure in self._seen and self._spent_s > _SHARE * (start - self._begin):
            return
        self._seen.add(structure)
        self.num_compared += 1
        if is_chunked:
            self._compare_chunks(dataset, layout=layout, where=where)
        else:
            self._compare_rows(dataset, layout=layout, where=where)
        self._spent_s += time.perf_counter() - start

    def _compare_rows(self, dataset: h5py.Dataset, *, layout: DatasetLayout, where: str) -> None:
        assert layout.offset is not None
        dims = len(dataset.shape)
        element_bytes = int(np.prod(layout.shape[dims:], dtype=np.int64)) * layout.dtype.itemsize
        row_bytes = int(np.prod(dataset.shape[1:], dtype=np.int64)) * element_bytes
        compared_bytes = row_bytes
        rest: tuple[int | slice, ...] = (slice(None),) * (dims - 1)
        if row_bytes > _COMPARED_BYTES and dims > 1:  # its first elements
            count = min(dataset.shape[-1], max(1, _COMPARED_BYTES // element_bytes))
            compared_bytes, rest = count * element_bytes, (*(0,) * (dims - 2), slice(0, count))
        file = OpenFile(Path(dataset.file.filename))
        try:
            for row in _first_middle_last(dataset.shape[0] if dims else 1):
                wanted = _hdf5_reads(dataset, (row, *rest) if dims else ...)
                found = os.pread(file.descriptor, compared_bytes, layout.offset + row * row_bytes)
                if wanted is not None and not _same(found, wanted, dtype=layout.dtype):
                    raise _differs(where, row)
        finally:
            file.close()

    def _compare_chunks(self, dataset: h5py.Dataset, *, layout: DatasetLayout, where: str) -> None:
        assert layout.chunks is not None
        path = Path(dataset.file.filename)
        file = OpenFile(path)
        try:
            reader = RowReader(path, opened=dataset.file)
            source = StoredChunks(reader, file=file, dataset=dataset.name, layout=layout)
            counts = [-(-size // part) for size, part in zip(layout.shape, layout.chunks, strict=True)]
            corners = ([0] * len(counts), [count // 2 for count in counts], [count - 1 for count in counts])
            for place in dict.fromkeys(tuple(corner) for corner in corners):
                first = [number * part for number, part in zip(place, layout.chunks, strict=True)]
                inside = tuple(
                    slice(begin, min(begin + part, size))
                    for begin, part, size in zip(first, layout.chunks, layout.shape, strict=True)
                )
                wanted = _hdf5_reads(dataset, inside)
                if wanted is None:
                    continue
                try:
                    values = source.load(place).values
                except (DataError, OSError, RuntimeError, ValueError, KeyError) as error:
                    raise _differs(where, first[0]) from error
                found = values[tuple(slice(0, size) for size in wanted.shape)]
                if not _same(found.tobytes(), wanted, dtype=found.dtype):
                    raise _differs(where, first[0])
        finally:
            file.close()


def _first_middle_last(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _hdf5_reads(dataset: h5py.Dataset, selection: Any) -> NDArray[Any] | None:
    """Returns the elements `dataset[selection]` as HDF5 reads them, or None if HDF5 cannot read them.

    If HDF5 cannot read them, the error will be reported when the sample is read for training.
    """
    try:
        return np.asarray(read_elements(dataset, selection))
    except (DataError, OSError, RuntimeError, ValueError):
        return None


def _same(found: bytes, wanted: NDArray[Any], *, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "b":  # any byte but 0 is true, and h5py's scalars have only 1
        return np.array_equal(np.frombuffer(found, np.uint8) != 0, wanted.reshape(-1) != 0)
    return found == wanted.astype(dtype, copy=False).tobytes()


def _differs(where: str, row: int) -> DataError:
    import h5py

    return DataError(
        f"{where} cannot be indexed: row {row}, read from its place in the file, differs from what HDF5 "
        f"{h5py.version.hdf5_version} reads. Write the file again with h5repack, index that, and report the file's "
        "structure (h5dump -p -H) to hpctrain"
    )
