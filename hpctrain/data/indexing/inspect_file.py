"""Inspects one existing HDF5 file: finds the requested datasets, their layout, and what the file says about them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpctrain.data.format.manifest import DTYPES
from hpctrain.data.format.manifest_entries import MASK_SUFFIX
from hpctrain.data.hdf5.filters import can_undo, undo
from hpctrain.data.hdf5.layout import (
    DatasetLayout,
    MissingFilter,
    class_texts,
    describe_type,
    element_of,
    has_numpys_bytes,
    hdf5_lock,
    layout_of,
    members_of,
    read_elements,
    why_not_converted,
)
from hpctrain.data.indexing.compare_samples import SampleComparison
from hpctrain.data.indexing.request import (
    ESCAPES,
    Decode,
    FieldRequest,
    escaped,
    format_of,
    matching_paths,
    newer_library,
    resolve,
)
from hpctrain.data.indexing.value_attributes import meaning_of_strings, place_of_values, value_meaning
from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py

# Says which stored values a filter may have changed or lost when they were written.


_N_BIT, _SCALE_OFFSET = 5, 6
# Maximum number of chunks of a dataset whose first bytes are read when it is indexed, and of bytes.
_MAX_CHUNKS, _MAX_BYTES = 256, 16 << 20
# A stored chunk begins with the bits per element (uint32), the bytes of the smallest number (uint8), and that number.
# Source: HDF5's H5Zscaleoffset.c
_BEFORE_SMALLEST = 5


def check_n_bit(layout: DatasetLayout, *, where: str) -> None:
    """Raises DataError if HDF5's n-bit filter comes after another filter, since HDF5 then loses bits.

    The n-bit filter decodes as many elements as a chunk has, even if the preceding filter has changed the number of
    bytes. For types that use all their bits, the n-bit filter returns the size of its buffer instead of the size of the
    data in the buffer (HDF5 1.10.8 and 2.0.0). So bits are lost, or the numbers differ from one read to the next.
    """
    codes = [each.code for each in layout.filters]
    if _N_BIT in codes[1:]:
        raise DataError(
            f"{where} is stored with HDF5's n-bit filter behind another one (filters {', '.join(map(str, codes))}), "
            "with which HDF5 may lose bits or read other numbers each time: write the data again with n-bit as the "
            "first filter, or without it"
        )


def scale_offset_note(dataset: h5py.Dataset, *, layout: DatasetLayout, where: str) -> str:
    """Returns a warning if floats are stored with HDF5's scale-offset filter, which loses NaN; else "".

    The filter stores differences to the smallest number of a chunk. HDF5 looks for that number by comparisons that
    begin with the first number, and comparisons with NaN are false (HDF5 1.10.8 and 2.0.0). Raises DataError if one of
    the first 256 chunks began with NaN when it was written: HDF5 1.10.8 reads such a chunk as zeros, without an error.
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


# Refuses datasets of which some samples were never written and have no fill value.


def check_written(dataset: h5py.Dataset, plist: h5py.h5p.PropDCID, *, where: str) -> None:
    """Raises DataError if elements of a table with references were never written and have no fill value.

    For such elements (fill time "never", or an undefined fill value) HDF5 leaves the memory of the reader unchanged.
    h5py passes zeroed memory to HDF5, except for types with references, for which it passes uninitialised memory. Rows
    then have values of other rows (h5py 3.16 with HDF5 1.10.8 and 2.0.0). The written chunks are counted only for
    tables with references, since HDF5 reads the chunk index to count them. `plist` is the property list with which the
    dataset was created.
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


# Inspects one existing HDF5 file.


_READ_ROWS = 1 << 14
_READ_LENGTHS = 256
_READ_BYTES = 8 << 20
MAX_CLASSES = 1 << 16
_NO_DTYPE = "for which numpy has no dtype: they cannot be indexed"


@dataclass(frozen=True, kw_only=True)
class FoundDataset:
    """An HDF5 dataset, or a member of a dataset of compound type, that was found in a file.

    Attributes:
        dataset: Path of the HDF5 dataset in the file.
        member: Name of the member, if this is a member of a compound type; else None.
        shape: Shape of the dataset, including the dimension of samples. For kind "lengths" the variable dimension is
            left out.
        dtype: Name of the numpy dtype of the elements; "str" for strings.
        kind: "numbers", "lengths" (each row is numbers of variable length) or "strings".
        offset: File offset in bytes if the dataset is contiguous, else None.
        big_endian: True if the numbers in the file are big-endian, False if they are little-endian.
        num_bytes: Uncompressed size of the elements in bytes.
        longest: Length of the longest row for kind "lengths", else 0.
        classes: The distinct strings, sorted, for kind "strings"; else empty.
        values: What the dataset's attributes, and other datasets, state about the values of the dataset: a
            `ValueMeaning` as JSON values. Empty if nothing is stated.
        note: Text that the user should read about the values, or "".
    """

    dataset: str
    member: str | None
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["numbers", "lengths", "strings"]
    offset: int | None
    big_endian: bool
    num_bytes: int
    longest: int = 0
    classes: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of_json(cls, document: dict[str, Any]) -> FoundDataset:
        lists = {"shape": tuple(document["shape"]), "classes": tuple(document["classes"])}
        return cls(**{**document, **lists})


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """One inspected HDF5 file, with the datasets of the requested fields.

    Each element of `places` contains the dataset of each field, by field name. There is one element, or one per
    matching group if the requested paths have a `*`.
    """

    path: str
    file_bytes: int
    modified_ns: int
    places: tuple[dict[str, FoundDataset], ...]

    @classmethod
    def of_json(cls, document: dict[str, Any]) -> FoundFile:
        places = tuple(
            {name: FoundDataset.of_json(found) for name, found in place.items()}
            for place in document["places"]
        )
        return cls(**{**document, "places": places})


def inspect_file(path: str, *, requests: Sequence[FieldRequest], comparison: SampleComparison) -> FoundFile:
    """Finds the requested datasets of a file.

    Reads headers, all strings, all rows of variable length, and up to three samples of other datasets. `comparison`
    compares these samples with what HDF5 reads. Raises DataError if the file is not HDF5, is open for writing or
    changes meanwhile, or if a dataset is missing, empty, or of a kind that cannot be read. The message names the file
    and the dataset.
    """
    with open_to_index(path) as file:
        before = os.stat(path)
        comparison.begin_file(file)
        if requests[0].has_wildcard:
            places = tuple(_groups(file, requests, comparison))
        else:
            places = (_place(file, {each.name: each.path for each in requests}, requests, comparison),)
    after = os.stat(path)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{path} changed while it was indexed: index it when no program is writing it")
    return FoundFile(path=path, file_bytes=after.st_size, modified_ns=after.st_mtime_ns, places=places)


@contextmanager
def open_to_index(path: str) -> Iterator[h5py.File]:
    """Opens an HDF5 file for a `with` block. Detects whether another program has the file open for writing.

    Such a program is detected by HDF5's file lock, and by the flag that writers set in the file. Raises DataError if
    the file cannot be opened, and in place of errors that HDF5 raises within the `with` block.
    """
    try:
        file = _open_locked(path)
        with file:
            yield file
    except FileNotFoundError:
        raise DataError(f"{path} is missing: there is no such file") from None
    except MissingFilter as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        text = str(error)
        if "lock file" in text or "already open" in text or "SWMR" in text or "consistency" in text:
            raise DataError(
                f"{path} is open for writing by another program, or was left so by a program that crashed: "
                "index it when it is closed (after a crash: h5clear -s FILE)"
            ) from error
        newer = newer_library(error)
        if newer is not None:
            raise DataError(f"{path} {newer}") from error
        other = format_of(path)
        if other is not None:
            raise DataError(f"{path} is {other}") from error
        raise DataError(f"{path} cannot be read as HDF5: {text}") from error


def _open_locked(path: str) -> h5py.File:
    import h5py

    try:
        return h5py.File(path, "r", locking="best-effort")
    except (ValueError, TypeError):  # this HDF5 does not support the option
        return h5py.File(path, "r")
    except OSError as error:
        if "locking flag values" not in str(error):
            raise
        # This process has the file open without locks, and HDF5 requires the same mode for every open.
        return h5py.File(path, "r", locking=False)


def _groups(
    file: h5py.File, requests: Sequence[FieldRequest], comparison: SampleComparison
) -> Iterator[dict[str, FoundDataset]]:
    """Finds the groups of a file that match the requested paths. Yields the datasets of each group by field name.

    Raises DataError unless every group has all fields.
    """
    paths = {request.name: matching_paths(file, request.parts) for request in requests}
    first = requests[0]
    keys = list(paths[first.name])
    if not keys:
        raise DataError(f"{file.filename} holds nothing that matches {first.path} (field {first.name!r})")
    for request in requests[1:]:
        other = set(keys) ^ set(paths[request.name])
        if other:
            place = "/".join(min(other))
            raise DataError(
                f"{file.filename}: {first.path} and {request.path} do not match the same groups; "
                f"{place!r} matches only one of them"
            )
    for key in keys:
        yield _place(file, {each.name: paths[each.name][key] for each in requests}, requests, comparison)


def _place(
    file: h5py.File, paths: Mapping[str, str], requests: Sequence[FieldRequest], comparison: SampleComparison
) -> dict[str, FoundDataset]:
    """Returns the datasets in one file or group, by field name, including the mask datasets of decoded fields.

    `paths` are the paths of the datasets by field name.
    """
    place: dict[str, FoundDataset] = {}
    for request in requests:
        path = paths[request.name]
        if request.decode is Decode.CF:
            path = place_of_values(file, resolve(file, path))
        found, dataset = _inspect(file, path, request, comparison)
        place[request.name] = found
        if found.kind == "strings":
            meaning = meaning_of_strings(file, path=found.dataset, member=found.member, dataset=dataset)
        else:
            meaning = value_meaning(
                file, path=found.dataset, member=found.member, dtype=found.dtype, dataset=dataset
            )
        if values := meaning.as_json():
            place[request.name] = replace(found, values=values)
        if request.decode is Decode.CF and meaning.mask is not None and not meaning.problem:
            mask, member = str(meaning.mask[0]), meaning.mask[1]
            of_mask = replace(request, name=request.name + MASK_SUFFIX, path=mask, member=member)
            place[of_mask.name], _ = _inspect(file, mask, of_mask, comparison)
    return place


def _inspect(
    file: h5py.File, path: str, request: FieldRequest, comparison: SampleComparison
) -> tuple[FoundDataset, h5py.Dataset]:
    """Returns the description of the dataset at `path`, which `request` asks for, and the open dataset."""
    import h5py

    where = f"field {request.name!r}, {path} of {file.filename},"
    try:
        resolved = resolve(file, path)
    except DataError as error:
        if request.member is None:
            raise
        raise DataError(f"{error} ({ESCAPES})") from None
    try:
        dataset = file[resolved]
    except (KeyError, OSError, RuntimeError) as error:
        newer = newer_library(error)
        raise DataError(f"{where} {newer or f'cannot be opened: {error}'}") from error
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{where} {_what_else(dataset)}")
    if dataset.shape is None:
        raise DataError(f"{where} is empty: it has no elements at all")
    plist = dataset.id.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        raise DataError(f"{where} is virtual, its data are in other files: index those files")
    if plist.get_external_count():
        raise DataError(f"{where} keeps its data in another file, which is not HDF5: copy it with h5repack")
    _refuse_pickled(dataset, where)
    layout = layout_of(dataset)
    if layout is None:
        raise DataError(f"{where} holds {describe_type(dataset.id.get_type())}, {_NO_DTYPE}")
    check_n_bit(layout, where=where)
    check_written(dataset, plist, where=where)
    dtype, shape = _element(dataset, layout, request, where)
    if request.member is not None:
        where = f"field {request.name!r}, {path}:{request.member} of {file.filename},"
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if layout.offset is not None and layout.offset + num_bytes > os.path.getsize(file.filename):
        raise DataError(f"{where} ends after the end of the file: the file is truncated")
    if 0 in shape:
        raise DataError(f"{where} is empty, its shape is {shape}: leave the file out")
    found = FoundDataset(
        dataset=resolved,
        member=request.member,
        shape=shape,
        dtype=dtype.name,
        kind="numbers",
        offset=layout.offset,
        big_endian=dtype.newbyteorder("=") != dtype and dtype.itemsize > 1,
        num_bytes=num_bytes,
        note=scale_offset_note(dataset, layout=layout, where=where),
    )
    if h5py.check_string_dtype(dtype) is not None:
        return _with_strings(found, dataset, where), dataset
    if h5py.check_vlen_dtype(dtype) is not None:
        return _with_lengths(found, dataset, np.dtype(h5py.check_vlen_dtype(dtype)), where), dataset
    _check_number(dtype, where)
    if layout.only_hdf5:
        element = element_of(dataset.id.get_type(), member=request.member)
        refusal = why_not_converted(element, dtype)
        if refusal is not None:
            raise DataError(
                f"{where} holds {describe_type(element)} that HDF5 cannot convert to {dtype.name} ({refusal})"
            )
    comparison.compare(dataset, layout=layout, where=where)
    return found, dataset


def _what_else(found: h5py.HLObject) -> str:
    """Returns a text that describes an object that is not a dataset: a group or a named type."""
    import h5py

    if not isinstance(found, h5py.Group):
        return "is a named type, not a dataset"
    if {"value", "shape"} <= set(found.attrs) and not len(found):
        value, shape = found.attrs["value"], np.atleast_1d(found.attrs["shape"]).tolist()
        return (
            f"is a constant component of openPMD, without a dataset: each of its elements is {value}, its shape is "
            f"{tuple(shape)}. Leave the field out, or write a dataset of that shape"
        )
    return f"is a group, not a dataset; it holds {', '.join(list(found)[:8]) or 'nothing'}"


def _element(
    dataset: h5py.Dataset, layout: DatasetLayout, request: FieldRequest, where: str
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the dtype of the dataset's elements, or of the requested member of them, and the dataset's shape.

    If the elements are of an array type, the last dimensions of the shape are those of the array type.
    """
    import h5py

    kind, dtype = dataset.id.get_type(), layout.dtype
    if dtype.names is None or not isinstance(kind, h5py.h5t.TypeCompoundID):
        if request.member is not None:
            raise DataError(f"{where} is not a table (compound): leave out ':{request.member}' ({ESCAPES})")
        return dtype, layout.shape
    members = members_of(kind)
    names = ", ".join(members)
    if request.member is None:
        raise DataError(
            f"{where} is a table (compound) of {names}: choose a member, as in "
            f"{request.name}={escaped(request.path)}:{escaped(dtype.names[-1])}"
        )
    if request.member not in members:
        raise DataError(f"{where} has no member {request.member!r}; its members are {names} ({ESCAPES})")
    if request.member not in dtype.names:
        found = describe_type(members[request.member])
        raise DataError(
            f"{where} has member {request.member!r} of {found}, {_NO_DTYPE}; other members can be"
        )
    member = dtype[request.member]
    return member.base, (*layout.shape, *member.shape)


def _refuse_pickled(dataset: h5py.Dataset, where: str) -> None:
    import h5py

    if not h5py.h5a.get_num_attrs(dataset.id):
        return
    if dataset.attrs.get("PSEUDOATOM") in (b"object", "object"):
        raise DataError(
            f"{where} holds pickled Python objects (as pandas writes strings in its fixed format), which are "
            "not read: write numbers, or strings with format='table'"
        )


def _check_number(dtype: np.dtype[Any], where: str) -> None:
    import h5py

    if h5py.check_ref_dtype(dtype) is not None:
        raise DataError(f"{where} holds references to objects, not data: index what they refer to")
    if dtype.names is not None:
        raise DataError(f"{where} is a table within a table, which cannot be indexed")
    if dtype.name not in DTYPES:
        raise DataError(f"{where} is {dtype.name}; possible are {', '.join(DTYPES)}, and strings")


def _blocks(dataset: h5py.Dataset, member: str | None, *, rows: int) -> Iterator[Any]:
    """Yields all elements of a dataset in blocks of `rows` rows."""
    if not dataset.shape:
        yield np.asarray(read_elements(dataset, member=member))
        return
    for start in range(0, dataset.shape[0], rows):
        yield read_elements(dataset, slice(start, start + rows), member=member)


def read_blocks(dataset: h5py.Dataset, member: str | None, *, row_bytes: int) -> Iterator[Any]:
    """Yields all elements of a dataset in blocks of about 8 MiB. A block has at least one row."""
    return _blocks(dataset, member, rows=max(1, _READ_BYTES // max(1, row_bytes)))


def _with_strings(found: FoundDataset, dataset: h5py.Dataset, where: str) -> FoundDataset:
    if found.shape[1:]:
        raise DataError(f"{where} has {found.shape[1:]} strings per sample; only one is possible, a label")
    names: set[str] = set()
    try:
        for block in _blocks(dataset, found.member, rows=_READ_ROWS):
            names.update(class_texts(block))
            if len(names) > MAX_CLASSES:
                raise DataError(f"{where} has over {MAX_CLASSES} different strings: that is text, not labels")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} has strings that are not UTF-8 ({error})") from None
    return replace(found, dtype="str", kind="strings", classes=tuple(sorted(names)), big_endian=False)


def _with_lengths(
    found: FoundDataset, dataset: h5py.Dataset, base: np.dtype[Any], where: str
) -> FoundDataset:
    _check_number(base, where)
    if len(found.shape) != 1 or base.hasobject:
        raise DataError(
            f"{where} has values of variable length in an array of shape {found.shape}; a sample can have only one"
        )
    if base.newbyteorder("=") != base and base.itemsize > 1:
        # h5py (seen with 3.16) returns their bytes as if they had this machine's byte order.
        raise DataError(
            f"{where} has variable lengths in the other byte order than this machine's, which h5py reads wrong: write "
            "it in the byte order of this machine"
        )
    element = element_of(dataset.id.get_type(), member=found.member)
    if not has_numpys_bytes(element, base):
        raise DataError(
            f"{where} has variable lengths of {describe_type(element)} that are not numpy's {base.name}: "
            f"write them as {base.name}"
        )
    longest = elements = 0
    for block in _blocks(dataset, found.member, rows=_READ_LENGTHS):
        lengths = [len(row) for row in block]
        longest, elements = max(longest, *lengths), elements + sum(lengths)
    if not longest:
        raise DataError(f"{where} holds {found.shape[0]} samples, which are all empty")
    return replace(
        found,
        dtype=base.name,
        kind="lengths",
        longest=longest,
        num_bytes=elements * base.itemsize,
        big_endian=False,
    )
