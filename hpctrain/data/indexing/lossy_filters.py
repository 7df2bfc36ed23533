"""Says which stored values a filter may have changed or lost when they were written."""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.data.hdf5.decode import can_undo, undo
from hpctrain.data.hdf5.layout import DatasetLayout, hdf5_lock
from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py

_N_BIT, _SCALE_OFFSET = 5, 6
# Chunks of a dataset whose beginnings are read when it is indexed, at most.
_MAX_CHUNKS, _MAX_BYTES = 256, 16 << 20
# A stored chunk begins with the number of bits of an element, uint32, the bytes of the smallest number, uint8, and it.
# Source: HDF5's H5Zscaleoffset.c
_BEFORE_SMALLEST = 5


def check_n_bit(layout: DatasetLayout, *, where: str) -> None:
    """Raises DataError if HDF5's n-bit filter is behind another filter.

    It takes as many elements as a chunk has, whatever the filter before has made of them, and for types that use all
    their bits it returns the size of its buffer, not that of the data in it (HDF5 1.10.8 and 2.0.0): bits are lost, or
    the numbers differ from one read to the next.
    """
    codes = [each.code for each in layout.filters]
    if _N_BIT in codes[1:]:
        raise DataError(
            f"{where} is stored with HDF5's n-bit filter behind another one (filters {', '.join(map(str, codes))}), "
            "with which HDF5 may lose bits or read other numbers each time: write the data again with n-bit as the "
            "first filter, or without it"
        )


def scale_offset_note(dataset: h5py.Dataset, *, layout: DatasetLayout, where: str) -> str:
    """Returns what the scale-offset filter does to NaN in floats; "" if the dataset is stored without it.

    The filter stores differences to the smallest number of a chunk, which it finds by comparing with the first one:
    comparisons with NaN are false (HDF5 1.10.8 and 2.0.0). Raises DataError if one of the first 256 chunks began with
    NaN when it was written: HDF5 1.10.8 reads such a chunk as zeros, without an error.
    """
    if layout.dtype.kind != "f" or not any(each.code == _SCALE_OFFSET for each in layout.filters):
        return ""
    row = _row_of_lost_chunk(dataset, layout)
    if row is not None:
        raise DataError(
            f"{where} has lost numbers: its chunk at row {row} began with NaN when HDF5's scale-offset filter stored "
            "it, and reads as zeros. Write the data again without that filter"
        )
    return (
        "is stored with HDF5's scale-offset filter, which does not keep NaN: it reads as the smallest number of its "
        "chunk, and a chunk that begins with NaN reads as zeros (HDF5 1.10.8) or not at all (2.0.0). If there was NaN, "
        "write the data again without the filter"
    )


def _row_of_lost_chunk(dataset: h5py.Dataset, layout: DatasetLayout) -> int | None:
    if layout.chunks is None or layout.filters[0].code != _SCALE_OFFSET or not can_undo(layout.filters[1:]):
        return None
    firsts = product(*(range(0, size, part) for size, part in zip(layout.shape, layout.chunks, strict=True)))
    read_bytes = 0
    end = _BEFORE_SMALLEST + layout.dtype.itemsize
    for first in islice(firsts, _MAX_CHUNKS):
        if read_bytes > _MAX_BYTES:
            return None
        try:
            with hdf5_lock():
                mask, data = dataset.id.read_direct_chunk(first)
            read_bytes += len(data)
            if mask & 1:
                continue
            stored = undo(data, filters=layout.filters[1:], mask=mask >> 1, num_bytes=None)
        except (
            DataError,
            OSError,
            RuntimeError,
            MemoryError,
        ):  # never written, or damaged, which reading it reports
            continue
        smallest = np.frombuffer(bytes(stored[_BEFORE_SMALLEST:end]), layout.dtype.newbyteorder("<"))
        if np.isnan(smallest).any():
            return first[0]
    return None
