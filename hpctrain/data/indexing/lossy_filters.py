"""Says which stored values a filter may have changed when they were written."""

from __future__ import annotations

from hpctrain.data.hdf5.layout import DatasetLayout

_SCALE_OFFSET = 6


def scale_offset_note(layout: DatasetLayout) -> str:
    """Returns what the scale-offset filter does to NaN in floats; "" if the dataset is stored without it.

    The filter stores differences to the smallest number of a chunk, and compares with `<`, which is false for NaN
    (seen with HDF5 1.10.8 and 2.0.0).
    """
    if layout.dtype.kind != "f" or not any(each.code == _SCALE_OFFSET for each in layout.filters):
        return ""
    return (
        "is stored with HDF5's scale-offset filter, which does not keep NaN: it reads as the smallest number of its "
        "chunk, and a chunk that begins with NaN reads as zeros (HDF5 1.10.8) or not at all (2.0.0). If there was NaN, "
        "write the data again without the filter"
    )
