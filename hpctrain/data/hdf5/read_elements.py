"""Reads elements of an HDF5 dataset through h5py, with the filters of hdf5plugin; reports a missing filter.

All data that HDF5 itself decodes is read here, so that all commands can read the same datasets.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpctrain.data.hdf5.stored_type import dtype_of
from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py

# Lower numbers: built-in filters, https://github.com/HDFGroup/hdf5_plugins/blob/master/docs/RegisteredFilterPlugins.md
_FIRST_REGISTERED = 256
_NAME_LENGTH = 40


class MissingFilter(DataError):
    """Raised if a filter that is needed to decode a dataset is not installed. The dataset is not damaged."""


class _Wanted(NamedTuple):
    code: int
    name: str


def read_elements(dataset: h5py.Dataset, selection: Any = ..., *, member: str | None = None) -> Any:
    """Returns `dataset[selection]`, or that of a member of its compound type. Loads filters of hdf5plugin if needed.

    selection: by default all elements, of a scalar an array without dimensions, which has a boolean's byte as it is
    stored, while `dataset[()]` has 1 for each that is not 0.

    Raises MissingFilter, which names the filter and what to install; OSError for other errors.
    """
    missing = _load_filters(dataset)
    try:
        return dataset[selection] if member is None else _member(dataset, selection, member)
    except OSError as error:
        # Reported only after an error, since the chunks may have been stored without the filter.
        if missing is None:
            raise
        raise MissingFilter(
            f"{dataset.name} is compressed with HDF5 filter {missing.code}"
            + (f" ({missing.name})" if missing.name else "")
            + f", {_what_to_do(missing)}"
        ) from error


def _member(dataset: h5py.Dataset, selection: Any, member: str) -> Any:
    # As `dataset.fields(member)[selection]`, which needs numpy's dtypes of all members.
    dtype = dtype_of(dataset.id.get_type())
    if dtype is None or dtype.names is None:
        raise DataError(f"{dataset.name} has no members that numpy can hold")
    return dataset.__getitem__(selection, new_dtype=np.dtype([(member, dtype[member])]))[member]


def _load_filters(dataset: h5py.Dataset) -> _Wanted | None:
    """Loads the filters of a dataset. Returns the first one that is not available, or None."""
    import h5py

    plist = dataset.id.get_create_plist()
    for number in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            with suppress(ImportError):
                # Registers its filters, except those that HDF5_PLUGIN_PATH provides.
                import hdf5plugin  # noqa: F401
        if not h5py.h5z.filter_avail(code):
            text = name.decode("ascii", "replace").split(";")[0]
            return _Wanted(code, "".join(c for c in text if c.isprintable())[:_NAME_LENGTH])
    return None


def _what_to_do(missing: _Wanted) -> str:
    if missing.code < _FIRST_REGISTERED:
        return "which the HDF5 of this h5py was built without: write the file again with another filter (h5repack)"
    try:
        import hdf5plugin
    except ImportError:
        return "which is not installed here: pip install hpctrain[formats]"
    return (
        f"which hdf5plugin {hdf5plugin.version} does not have: install a newer hdf5plugin, let HDF5_PLUGIN_PATH "
        "name the folder of this filter's plugin, or write the file again with another filter (h5repack)"
    )
