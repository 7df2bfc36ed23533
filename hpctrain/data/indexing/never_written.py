"""Refuses datasets of which some samples were never written and have no fill value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py


def check_written(dataset: h5py.Dataset, plist: h5py.h5p.PropDCID, *, where: str) -> None:
    """Raises DataError if elements of a table with references were never written and have no fill value.

    HDF5 leaves the reader's memory as it is for such elements (fill time "never", or an undefined fill value). h5py
    gives it zeros, but for types with references uninitialised memory: rows then have values of other rows (h5py 3.16
    with HDF5 1.10.8 and 2.0.0). plist: with which the dataset was created. Only for these datasets HDF5 counts the
    chunks, and reads their index to do so.
    """
    import h5py

    is_filled = (
        plist.get_fill_time() != h5py.h5d.FILL_TIME_NEVER
        and plist.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED
    )
    if is_filled or not dataset.id.get_type().detect_class(h5py.h5t.REFERENCE):
        return
    if plist.get_layout() == h5py.h5d.CHUNKED:
        chunks = zip(dataset.shape, plist.get_chunk(), strict=True)
        is_written = dataset.id.get_num_chunks() >= math.prod(-(-size // part) for size, part in chunks)
    else:
        is_written = dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_ALLOCATED
    if not is_written:
        raise DataError(
            f"{where} is a table with references, has rows that were never written, and no fill value: h5py returns "
            "values of other rows for them. Write these rows, or copy the columns without the references"
        )
