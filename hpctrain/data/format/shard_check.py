"""Compares a shard's file with the manifest before samples are read from it; does not read the samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.format.manifest import FieldSpec, Manifest, ShardEntry
from hpctrain.data.format.shard_file import structure_hash
from hpctrain.data.hdf5.layout import DatasetLayout, inspect
from hpctrain.errors import DataError

HEADERS_DIFFER = "the HDF5 headers differ from what was written"


class HeadersDamaged(DataError):
    """Raised if the HDF5 headers of a file of the right size differ from those that were written."""


def check_shard_size(directory: Path, *, manifest: Manifest, entry: ShardEntry) -> None:
    """Compares a shard's size, for indexed files also its modification time, with the manifest: one `stat`.

    A packed shard of another size may have been rewritten with other HDF5 tools: it is checked by `check_shard`.
    Raises DataError that names the shard.
    """
    path = directory / entry.file
    try:
        status = path.stat()
    except FileNotFoundError:
        raise _missing(directory, entry=entry, manifest=manifest) from None
    except OSError as error:
        raise DataError(f"shard {path} cannot be looked up: {error}") from error
    check_unchanged(status, entry=entry, path=path)
    if status.st_size != entry.file_bytes:
        check_shard(directory, manifest=manifest, entry=entry)


def check_shard(
    directory: Path, *, manifest: Manifest, entry: ShardEntry, path: Path | None = None
) -> dict[str, DatasetLayout]:
    """Compares a shard's file with the manifest. Returns field -> layout of its HDF5 dataset.

    path: a copy of the file, which is checked instead. A packed shard that was rewritten with other HDF5 tools
    (chunks, compression) is accepted if shapes and dtypes fit. An indexed file must have the size and modification
    time of the manifest. HDF5 opens the file only if the manifest does not say where all fields are, or the headers
    were not compared with their hash.
    Raises DataError that names the shard, and the field if one is the cause.
    """
    original = directory / entry.file
    found_path = original if path is None else path
    try:
        descriptor = os.open(found_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            check_unchanged(status, entry=entry, path=found_path, is_copy=path is not None)
            intact = _headers_are_intact(
                descriptor, file_bytes=status.st_size, entry=entry, path=found_path, manifest=manifest
            )
        finally:
            os.close(descriptor)
        trusted = _trusted_layouts(manifest, entry) if intact or entry.modified_ns is not None else None
        if trusted is not None:
            return trusted
        layouts = inspect(found_path, names=sorted({f.dataset for f in entry.fields.values()}))
    except FileNotFoundError:
        raise _missing(directory, entry=entry, manifest=manifest) from None
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        # h5py raises many types of exceptions for damaged headers.
        if "status" in locals() and status.st_size < entry.file_bytes:
            reason = cut_short(found_path, entry, status.st_size)
            raise DataError(f"{reason} (error of HDF5: {error})") from error
        raise DataError(f"shard {found_path} cannot be opened as HDF5: {error}") from error
    by_field = {}
    for name, stored in entry.fields.items():
        layout = layouts.get(stored.dataset)
        if layout is None:
            raise DataError(
                f"shard {found_path} has no dataset {stored.dataset!r} for field {name!r}: {_again(manifest)}"
            )
        _check_field(name, layout, manifest=manifest, entry=entry, path=found_path)
        if layout.offset is not None:
            end = layout.offset + _bytes_of(layout)
            if end > status.st_size:
                raise DataError(cut_short(found_path, entry, status.st_size))
            moved = stored.offset is not None and layout.offset != stored.offset
            if status.st_size == entry.file_bytes and moved:
                raise DataError(
                    f"field {name!r} of shard {found_path} begins at byte {layout.offset}, the manifest says "
                    f"{stored.offset}: its HDF5 header is damaged, restore it or {_again(manifest)}"
                )
        by_field[name] = layout
    return by_field


def _missing(directory: Path, *, entry: ShardEntry, manifest: Manifest) -> DataError:
    return DataError(
        f"shard {entry.file} of {directory} is missing (the manifest lists {len(manifest.shards)} "
        f"shards): copy it again, or {_again(manifest)}"
    )


def _headers_are_intact(
    descriptor: int, *, file_bytes: int, entry: ShardEntry, path: Path, manifest: Manifest
) -> bool:
    """Compares the HDF5 headers with their hash before HDF5 reads them: damaged headers can crash it (1.10.8).

    Returns False without reading for files of another size, which were rewritten or truncated, and for files with
    chunks, which the hash covers, so that the whole file would be read. Raises HeadersDamaged or OSError.
    """
    extents = [(f.offset, f.num_bytes) for f in entry.fields.values() if f.offset is not None]
    if entry.structure_hash is None or len(extents) < len(entry.fields) or file_bytes != entry.file_bytes:
        return False
    if structure_hash(descriptor, file_bytes=file_bytes, extents=extents) != entry.structure_hash:
        raise HeadersDamaged(f"shard {path}: {HEADERS_DIFFER}: restore it or {_again(manifest)}")
    return True


def check_unchanged(status: os.stat_result, *, entry: ShardEntry, path: Path, is_copy: bool = False) -> None:
    """Raises DataError if the size or modification time of an indexed file differs from the manifest.

    is_copy: ignore the time.
    """
    if entry.modified_ns is None:
        return
    if status.st_size < entry.file_bytes:
        raise DataError(cut_short(path, entry, status.st_size))
    if status.st_size != entry.file_bytes or (status.st_mtime_ns != entry.modified_ns and not is_copy):
        raise DataError(
            f"file {path} has changed since it was indexed (now {status.st_size} bytes, modified at "
            f"{status.st_mtime_ns} ns; then {entry.file_bytes} bytes, {entry.modified_ns} ns): index the files again"
        )


def cut_short(path: Path, entry: ShardEntry, found_bytes: int) -> str:
    """Returns the error message for a file that is shorter than in the manifest."""
    return (
        f"shard {path} is cut short: {found_bytes} bytes, the manifest says {entry.file_bytes} "
        f"({entry.samples} samples): copy it again, or {'pack' if entry.modified_ns is None else 'index'} again"
    )


def _again(manifest: Manifest) -> str:
    return "index the files again" if manifest.indexed else "pack again"


def _bytes_of(layout: DatasetLayout) -> int:
    return int(np.prod(layout.shape, dtype=np.int64)) * layout.dtype.itemsize


def _trusted_layouts(manifest: Manifest, entry: ShardEntry) -> dict[str, DatasetLayout] | None:
    """Returns the layouts from the manifest if all fields are contiguous, else None."""
    if not manifest.has_checked_types:
        return None
    layouts = {}
    for name, stored in entry.fields.items():
        spec = manifest.fields[name]
        if stored.offset is None or stored.member is not None or spec.kind != "array":
            return None
        shape = manifest.entry_shape(name, entry)
        if not stored.whole:
            shape = (stored.first_row + shape[0], *shape[1:])
        dtype = np.dtype(spec.dtype).newbyteorder(">" if stored.big_endian else "<")
        layouts[name] = DatasetLayout(shape=shape, dtype=dtype, offset=stored.offset)
    return layouts


def _check_field(
    name: str, layout: DatasetLayout, *, manifest: Manifest, entry: ShardEntry, path: Path
) -> None:
    """Raises DataError if dtype or shape of an HDF5 dataset differ from the manifest."""
    spec, stored = manifest.fields[name], entry.fields[name]
    dtype, shape = layout.dtype, layout.shape
    if stored.member is not None:
        if dtype.names is None or stored.member not in dtype.names:
            raise DataError(f"dataset {stored.dataset!r} of shard {path} has no member {stored.member!r}")
        member = dtype[stored.member]
        dtype, shape = member.base, (*shape, *member.shape)
    found, wanted = _dtype_name(dtype, spec, whole=stored.whole), _wanted_dtype(spec)
    if spec.kind == "array":
        expected = manifest.entry_shape(name, entry)
        fits = shape == expected
    elif stored.whole and spec.kind == "classes":  # one string, perhaps in an array of one
        expected = spec.shape
        fits = shape in ((), (1,))
    elif stored.whole:
        expected = spec.shape
        fits = len(shape) == len(expected) and shape[1:] == expected[1:] and shape[:1] <= expected[:1]
    else:
        expected = (entry.samples,)
        fits = shape == expected
    if not fits and manifest.indexed and not stored.whole and shape and shape[1:] == expected[1:]:
        # The rows of an indexed dataset may belong to several entries, or be used in part.
        fits = shape[0] >= stored.first_row + expected[0]
    if found != wanted or not fits:
        raise DataError(
            f"field {name!r} of shard {path} is {found} {shape}, the manifest says {wanted} {expected}: "
            f"the shard belongs to another dataset, {_again(manifest)}"
        )


def _wanted_dtype(spec: FieldSpec) -> str:
    return "string" if spec.kind == "classes" else spec.dtype


def _dtype_name(dtype: np.dtype[Any], spec: FieldSpec, *, whole: bool) -> str:
    """Returns numpy's name of the dtype, "string" for strings, and the name of the elements for ragged rows."""
    import h5py

    if h5py.check_string_dtype(dtype) is not None:
        return "string"
    elements = h5py.check_vlen_dtype(dtype)
    if elements is not None and spec.kind == "ragged" and not whole:
        return str(np.dtype(elements).name)
    return dtype.name
