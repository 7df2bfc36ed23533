"""Inspects HDF5 files: finds the offsets of datasets and chunks, and reads data through h5py if necessary.

h5py is imported on first use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py

# Compares types of HDF5 files with numpy's: which elements have the same bytes, which ones HDF5 must
# convert.
#
# An HDF5 type has properties that numpy has no name for: an integer may use 12 of its 16 bits, a float of 2
# bytes may have 8 exponent bits. h5py reads such elements as the next larger numpy dtype; their stored
# bytes mean something else.


def dtype_of(kind: h5py.h5t.TypeID) -> np.dtype[Any] | None:
    """Returns the numpy dtype in which h5py reads elements of the HDF5 type `kind`.

    Returns None if numpy has no dtype for these elements, as for 24-bit integers. The dtype of a compound contains only
    the members for which numpy has a dtype.
    """
    import h5py

    try:
        dtype: np.dtype[Any] = kind.dtype
        return dtype
    except (TypeError, ValueError, OverflowError, LookupError, RuntimeError):
        if not isinstance(kind, h5py.h5t.TypeCompoundID):
            return None
    members = [(name, dtype_of(member)) for name, member in members_of(kind).items()]
    readable = [(name, dtype) for name, dtype in members if dtype is not None]
    return np.dtype(readable) if readable else None


def members_of(kind: h5py.h5t.TypeCompoundID) -> dict[str, h5py.h5t.TypeID]:
    """Returns the HDF5 types of the members of a compound type, by name."""
    return {
        kind.get_member_name(number).decode("utf-8", "surrogateescape"): kind.get_member_type(number)
        for number in range(kind.get_nmembers())
    }


def element_of(kind: h5py.h5t.TypeID, *, member: str | None = None) -> h5py.h5t.TypeID:
    """Returns the HDF5 type of the numbers that an element of type `kind` consists of.

    For array types and types of variable length, this is the base type. With `member`, `kind` is a compound type, and
    the numbers are those of that member.
    """
    from h5py import h5t

    if member is not None and isinstance(kind, h5t.TypeCompoundID):
        kind = members_of(kind)[member]
    while isinstance(kind, h5t.TypeArrayID | h5t.TypeVlenID):
        kind = kind.get_super()
    return kind


def why_not_converted(kind: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> str | None:
    """Returns the error message of HDF5 if HDF5 cannot convert stored numbers of type `kind` to `dtype`, else None.

    The function converts two elements to find out, since some functions of HDF5 fail only when they meet a number.
    """
    from h5py import h5t

    memory = h5t.py_create(dtype)
    data = np.full(2 * max(kind.get_size(), memory.get_size()), 0x35, dtype=np.uint8)
    try:
        h5t.convert(kind, memory, 2, data, np.zeros_like(data))
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return None


def has_numpys_bytes(kind: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> bool:
    """Returns True if stored elements of the HDF5 type `kind` have the same bytes as numpy elements of `dtype`.

    This requires that the following properties are equal: class, size, byte order, precision, bit offset and sign. For
    floats also the place and size of exponent and mantissa, the bias and the normalisation. For enums also the names
    and values of the members. Returns False for compounds, strings, references and types of variable length, which are
    always read by HDF5.
    """
    from h5py import h5t

    if isinstance(kind, h5t.TypeArrayID):
        return has_numpys_bytes(kind.get_super(), dtype.base)
    if isinstance(kind, h5t.TypeEnumID):
        return bool(kind.equal(h5t.py_create(dtype, logical=True)))
    if isinstance(kind, h5t.TypeBitfieldID):  # h5py has no functions for its precision and offset
        return any(kind.equal(same) for same in _bit_fields(dtype))
    if not isinstance(kind, h5t.TypeIntegerID | h5t.TypeFloatID):
        return False
    if kind.equal(_type_of(dtype.str)):  # nearly always; the rest is for properties that mean nothing here
        return True
    size = kind.get_size()
    if (size, 8 * size, 0) != (dtype.itemsize, kind.get_precision(), kind.get_offset()):
        return False
    if size > 1 and kind.get_order() != (h5t.ORDER_LE if _is_little_endian(dtype) else h5t.ORDER_BE):
        return False
    if isinstance(kind, h5t.TypeFloatID):
        return dtype.kind == "f" and _format(kind) == _format(h5t.py_create(dtype))
    return dtype.kind == ("i" if kind.get_sign() == h5t.SGN_2 else "u")


@lru_cache
def _type_of(dtype: str) -> h5py.h5t.TypeID:
    from h5py import h5t

    return h5t.py_create(np.dtype(dtype))


def _bit_fields(dtype: np.dtype[Any]) -> list[h5py.h5t.TypeID]:
    """Returns the HDF5 bit field types that use all bits of numpy integers of `dtype`; [] if it is not unsigned."""
    from h5py import h5t

    if dtype.kind != "u":
        return []
    order = "LE" if _is_little_endian(dtype) else "BE"
    return [getattr(h5t, f"STD_B{8 * dtype.itemsize}{order}")]


def _format(kind: h5py.h5t.TypeFloatID) -> tuple[Any, ...]:
    return (*kind.get_fields(), kind.get_ebias(), kind.get_norm())


def _is_little_endian(dtype: np.dtype[Any]) -> bool:
    return dtype.newbyteorder("<") == dtype


def describe_type(kind: h5py.h5t.TypeID) -> str:
    """Returns a description of an HDF5 type for which numpy has no dtype."""
    from h5py import h5t

    names = {
        h5t.INTEGER: "integers",
        h5t.FLOAT: "floats",
        h5t.TIME: "times (H5T_TIME)",
        h5t.BITFIELD: "bit fields",
        h5t.ENUM: "an enumeration",
        h5t.COMPOUND: "a compound",
        h5t.ARRAY: "arrays",
        h5t.OPAQUE: "opaque elements",
        h5t.VLEN: "variable lengths",
    }
    return f"{names.get(kind.get_class(), 'elements')} of {kind.get_size()} bytes"


# Reads elements of an HDF5 dataset through h5py, with the filters of hdf5plugin; reports a missing filter.
#
# All data that HDF5 itself decodes is read here, so that all commands can read the same datasets.


# Lower numbers: built-in filters, https://github.com/HDFGroup/hdf5_plugins/blob/master/docs/RegisteredFilterPlugins.md
_FIRST_REGISTERED = 256
_NAME_LENGTH = 40


class MissingFilter(DataError):
    """Raised if an HDF5 filter that is needed to decode a dataset is not installed. The dataset is not damaged."""


class _Wanted(NamedTuple):
    code: int
    name: str


def read_elements(dataset: h5py.Dataset, selection: Any = ..., *, member: str | None = None) -> Any:
    """Returns `dataset[selection]`, or with `member` only that member of its compound type.

    Loads the filters of hdf5plugin if needed. By default returns all elements. For a scalar dataset this is an array
    without dimensions, in which a boolean has the stored byte (`dataset[()]` replaces any byte other than 0 by 1).
    Raises MissingFilter, which states the filter and what to install, and OSError for other errors.
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
        raise DataError(f"{dataset.name} has no members for which numpy has a dtype")
    return dataset.__getitem__(selection, new_dtype=np.dtype([(member, dtype[member])]))[member]


def _load_filters(dataset: h5py.Dataset) -> _Wanted | None:
    """Loads the filters that a dataset needs. Returns the first filter that is not installed, or None."""
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


# Inspects HDF5 files.


def class_texts(values: NDArray[Any] | Any) -> list[str]:
    """Returns one str per element of `values`, which are strings in the form in which h5py reads them.

    The elements may be bytes or str, of fixed or variable length. Raises UnicodeDecodeError (a ValueError) if bytes
    are not UTF-8.
    """
    flat = np.atleast_1d(np.asarray(values)).reshape(-1)
    return [value.decode("utf-8") if isinstance(value, bytes) else str(value) for value in flat.tolist()]


class Filter(NamedTuple):
    """One filter of a dataset's filter pipeline: the number under which HDF5 knows it, and its parameters."""

    code: int
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetLayout:
    """Shape, dtype and location of an HDF5 dataset.

    Attributes:
        shape: Shape of the dataset. If the elements are of an array type, the last dimensions are those of this type.
        dtype: Numpy dtype in which h5py reads the elements. For a compound it contains the members for which numpy has
            a dtype.
        offset: File offset of the first byte. None if the dataset is not contiguous (chunked, compressed, compact,
            external, never written), or if the stored elements have not the same bytes as elements of `dtype`.
        chunks: Shape of a chunk; None if the dataset is not chunked.
        filters: Filters of the chunks, in the order in which they are applied when writing.
        only_hdf5: True if chunks must be read through HDF5, since HDF5 has to convert their elements.
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
    """Returns shape, dtype and location of the named datasets of a file, by name.

    Names that do not exist are left out. Raises OSError if the file is not a complete HDF5 file. Raises DataError if a
    name is a soft or external link, or is not a dataset in this file for which numpy has a dtype.
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
                raise DataError(f"{name!r} in {path} is not an HDF5 dataset, or is one without elements")
            if dataset.file.filename != file.filename:
                raise DataError(f"{name!r} in {path} is in another file, {dataset.file.filename}")
            layout = layout_of(dataset)
            if layout is None:
                kind = describe_type(dataset.id.get_type())
                raise DataError(f"{name!r} in {path} holds {kind}, for which numpy has no dtype")
            layouts[name] = layout
    return layouts


def layout_of(dataset: h5py.Dataset) -> DatasetLayout | None:
    """Returns shape, dtype and location of a dataset, or None if numpy has no dtype for its elements."""
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
    """Returns the file offset of a contiguous dataset, or None if the dataset was never written and has no offset.

    `get_offset` alone does not suffice: HDF5 1.10 adds the size of the user block also to the value that stands for
    "no offset", which then looks like an offset.
    """
    import h5py

    if dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
        return None
    offset: int | None = dataset.id.get_offset()
    return offset


def hdf5_lock() -> AbstractContextManager[object]:
    """Returns the lock that h5py holds while it calls HDF5. A thread that holds the lock may take it again.

    Hold the lock when you call functions of h5py's low-level interface: h5py 3.14 and older do not take the lock in
    read_direct_chunk. Without the lock, threads that read chunks got errors, or the process ended.
    """
    from h5py._objects import phil

    lock: AbstractContextManager[object] = phil
    return lock


class RowReader:
    """Reads datasets of one file through h5py, for data that cannot be read without HDF5.

    h5py lets only one thread at a time call the HDF5 library. Must not be used after a fork. Raises OSError if the
    file cannot be opened.
    """

    def __init__(self, path: Path, *, opened: h5py.File | None = None) -> None:
        """Opens the file at `path`, unless `opened` is given: that file, already open. `close` closes the file."""
        self._file = _open(path) if opened is None else opened
        self.user_block_bytes = int(self._file.userblock_size)
        self._datasets: dict[str, h5py.Dataset] = {}

    def _dataset(self, name: str) -> h5py.Dataset:
        dataset = self._datasets.get(name)
        if dataset is None:
            dataset = self._datasets[name] = self._file[name]
        return dataset

    def rows(self, name: str, *, start: int, stop: int, member: str | None = None) -> NDArray[Any]:
        """Returns rows start to stop - 1 of dataset `name`. With `member`, returns only that member of the rows.

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
        """Returns the location of a chunk in the file, or None if the chunk was never written.

        `first` is the index of the chunk's first element in each dimension. Call this only for datasets of which HDF5
        returns correct locations (`ChunkAccess.PLACES`). HDF5 1.10 searches all chunks of the dataset for the location.
        Raises OSError or RuntimeError.
        """
        with hdf5_lock():
            info = self._dataset(name).id.get_chunk_info_by_coord(first)
        if info.byte_offset is None:
            return None
        return ChunkPlace(int(info.byte_offset), int(info.size), int(info.filter_mask))

    def stored_chunk(self, name: str, *, first: tuple[int, ...]) -> tuple[int, bytes]:
        """Returns the filter mask and the stored bytes of a chunk. Raises OSError.

        `first` is the index of the chunk's first element in each dimension.
        """
        with hdf5_lock():
            mask, data = self._dataset(name).id.read_direct_chunk(first)
        return int(mask), data

    def header_offset(self, name: str) -> int:
        """Returns the offset in bytes of the object header of dataset `name`, relative to the end of the user block."""
        import h5py

        with hdf5_lock():
            return int(h5py.h5o.get_info(self._dataset(name).id).addr)

    def first_is_unlimited(self, name: str) -> bool:
        """Returns True if the first dimension of a dataset may grow without a limit."""
        return self._dataset(name).maxshape[:1] == (None,)

    def chunk(self, name: str, *, first: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        """Returns the elements of a chunk as HDF5 reads them. Elements outside the dataset are zeros.

        `first` is the index of the chunk's first element in each dimension, `shape` the shape of a chunk. Raises
        MissingFilter or OSError.
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
    """Location of one stored chunk: its file offset, its size in bytes, and its filter mask.

    Bit i of the mask is set if filter i was not applied to the chunk.
    """

    offset: int
    num_bytes: int
    filter_mask: int
