"""Writes shard files, and compares a shard file with the manifest before samples are read from it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data.format.manifest import (
    PARTIAL_SUFFIX,
    SHARD_PREFIX,
    FieldSpec,
    Manifest,
    ShardEntry,
    StoredField,
)
from hpctrain.data.hdf5.create import create
from hpctrain.data.hdf5.filters import SMALLEST_SAMPLE_BYTES, Chunks, ShardCompression, compress
from hpctrain.data.hdf5.layout import DatasetLayout, inspect
from hpctrain.errors import DataError
from hpctrain.storage import hash_of, read_up_to, write_fully

# Writes one shard: an HDF5 file with one dataset per field, contiguous or compressed, hashed from memory.


RECORD_SUFFIX = ".json"
_READ_BYTES = 1 << 20


def shard_name(index: int, *, part: int | None = None) -> str:
    """Returns the file name of the shard of index `index`.

    If the source is packed in parts, `part` is the index of the part, and `index` that of the shard in the part.
    """
    return f"{SHARD_PREFIX}{'' if part is None else f'{part:05d}-'}{index:05d}.h5"


def shard_number(name: str) -> tuple[int, ...]:
    """Returns the numbers in a shard's file name. Shards are sorted by these numbers."""
    return tuple(map(int, re.findall(r"\d+", name.removesuffix(".h5"))))


def record_name(file: str) -> str:
    """Returns the name of the small file that records that the shard file `file` is finished.

    These records exist until the manifest is written.
    """
    return f".{file.removesuffix('.h5')}{RECORD_SUFFIX}"


def is_shard_name(name: str) -> bool:
    """Returns True if `name` is the name of a file that packing writes for a shard.

    These are the shard itself, a partly written shard, and the record of a finished shard.
    """
    return (name.startswith(SHARD_PREFIX) and name.endswith(".h5")) or (
        name.startswith(f".{SHARD_PREFIX}") and name.endswith((PARTIAL_SUFFIX, RECORD_SUFFIX))
    )


def block_ranges(num_bytes: int, *, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the byte range (start, stop) of each block of `block_bytes` bytes in data of `num_bytes` bytes.

    The last block may be shorter.
    """
    for start in range(0, num_bytes, block_bytes):
        yield start, min(start + block_bytes, num_bytes)


def read_bytes(descriptor: int, num_bytes: int, *, offset: int) -> bytearray:
    """Reads `num_bytes` bytes at file offset `offset`. Returns fewer bytes only if the file ends too early."""
    data = bytearray(num_bytes)
    del data[read_up_to(descriptor, memoryview(data), offset=offset) :]
    return data


def hash_outside_extents(descriptor: int, *, file_bytes: int, extents: Iterable[tuple[int, int]]) -> str:
    """Returns the xxh3_64 hash of the bytes of a file outside the given extents. HDF5 headers are such bytes.

    Each extent is a pair (offset, num_bytes).
    """
    digest = xxhash.xxh3_64()
    position = 0
    for offset, num_bytes in [*sorted(extents), (file_bytes, 0)]:
        while position < offset:
            part = read_bytes(descriptor, min(_READ_BYTES, offset - position), offset=position)
            if not part:
                break
            digest.update(part)
            position += len(part)
        position = max(position, offset + num_bytes)
    return digest.hexdigest()


def extents_of(fields: Mapping[str, StoredField]) -> list[tuple[int, int]]:
    """Returns file offset and length, in bytes, of each of `fields` that is contiguous in the file."""
    return [(field.offset, field.num_bytes) for field in fields.values() if field.offset is not None]


def write_shard(
    directory: Path,
    *,
    file: str,
    samples: int,
    arrays: Mapping[str, NDArray[Any]],
    block_bytes: int,
    other_datasets: Mapping[str, NDArray[Any]] | None = None,
    compression: ShardCompression | None = None,
) -> ShardEntry:
    """Writes a shard file. The file is written under a temporary name, flushed to disk, then renamed.

    Args:
        directory: Directory of the dataset.
        file: Name of the shard file.
        samples: Number of samples in the shard.
        arrays: The array to store for each field, by name. The dtypes are those of the manifest, in any byte order.
        block_bytes: Size of the hashed blocks in bytes.
        other_datasets: Arrays of additional HDF5 datasets that are not fields, by name. The structure hash of the
            shard covers them.
        compression: How to compress fields whose samples are large enough; None: no compression. The structure hash
            covers the compressed chunks, too.

    Returns:
        The shard's entry for the manifest.

    Raises:
        DataError: After an error of the filesystem.
    """
    path = directory / file
    partial = directory / f".{file}{PARTIAL_SUFFIX}"
    stored = {name: _little_endian(array) for name, array in arrays.items()}
    others = {name: _little_endian(array) for name, array in (other_datasets or {}).items()}
    chunked = {} if compression is None else _compressed(stored, samples=samples, compression=compression)
    placed = {name: a for name, a in {**stored, **others}.items() if name not in chunked}
    try:
        offsets = create(
            partial, datasets={name: (a.shape, a.dtype) for name, a in placed.items()}, chunked=chunked
        )
        descriptor = os.open(partial, os.O_RDWR)
        try:
            for name, array in others.items():
                if name in offsets:  # an empty dataset has no offset
                    write_fully(descriptor, _bytes_of(array), offset=offsets[name])
            fields = {}
            for name, array in stored.items():
                data = _bytes_of(array)
                hashes = []
                for start, stop in block_ranges(len(data), block_bytes=block_bytes):
                    block = data[start:stop]
                    hashes.append(hash_of(block))
                    if name in offsets:
                        write_fully(descriptor, block, offset=offsets[name] + start)
                fields[name] = StoredField(
                    dataset=name, offset=offsets.get(name), num_bytes=len(data), hashes=tuple(hashes)
                )
            file_bytes = os.fstat(descriptor).st_size
            structure = hash_outside_extents(descriptor, file_bytes=file_bytes, extents=extents_of(fields))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"shard {path} cannot be written: {error}") from error
    return ShardEntry(
        file=path.name, samples=samples, file_bytes=file_bytes, structure_hash=structure, fields=fields
    )


def is_as_written(directory: Path, *, entry: ShardEntry, block_bytes: int) -> bool:
    """Returns True if the shard file exists, and its size and all its hashes are those in `entry`. Reads the file."""
    try:
        descriptor = os.open(directory / entry.file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(descriptor).st_size != entry.file_bytes:
            return False
        found = hash_outside_extents(
            descriptor, file_bytes=entry.file_bytes, extents=extents_of(entry.fields)
        )
        if found != entry.structure_hash:
            return False
        for field in entry.fields.values():
            if field.offset is None:
                continue
            ranges = block_ranges(field.num_bytes, block_bytes=block_bytes)
            for (start, stop), expected in zip(ranges, field.hashes, strict=True):
                data = read_bytes(descriptor, stop - start, offset=field.offset + start)
                if hash_of(data) != expected:
                    return False
        return True
    finally:
        os.close(descriptor)


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _compressed(
    arrays: Mapping[str, NDArray[Any]], *, samples: int, compression: ShardCompression
) -> dict[str, Chunks]:
    """Compresses the arrays of those fields whose samples are large enough, and returns their chunks by field name.

    A chunk contains the rows of `compression.chunk_samples` samples: len(array) // samples rows per sample.
    """
    return {
        name: compress(
            array,
            rows=max(1, compression.chunk_samples * (len(array) // samples)),
            compression=compression,
        )
        for name, array in arrays.items()
        if array.nbytes // samples >= SMALLEST_SAMPLE_BYTES
    }


# Compares a shard's file with the manifest before samples are read from it; does not read the samples.


HEADERS_DIFFER = "the HDF5 headers differ from what was written"


class HeadersDamaged(DataError):
    """Raised if a file has the size that the manifest states, but not the HDF5 headers that were written."""


def check_shard_size(directory: Path, *, manifest: Manifest, entry: ShardEntry) -> None:
    """Compares the size of a shard's file with the manifest, for indexed files also the modification time.

    Costs one `stat`. If a packed shard has another size, it may have been rewritten with other HDF5 tools: its headers
    are then checked by `check_shard`. Raises DataError that names the shard.
    """
    path = directory / entry.file
    try:
        status = path.stat()
    except FileNotFoundError:
        raise _missing(directory, entry=entry, manifest=manifest) from None
    except OSError as error:
        raise DataError(f"shard {path} cannot be accessed: {error}") from error
    check_unchanged(status, entry=entry, path=path)
    if status.st_size != entry.file_bytes:
        check_shard(directory, manifest=manifest, entry=entry)


def check_shard(
    directory: Path, *, manifest: Manifest, entry: ShardEntry, path: Path | None = None
) -> dict[str, DatasetLayout]:
    """Compares a shard's file with the manifest, and returns the layout of the HDF5 dataset of each field.

    If `path` is given, it leads to a copy of the file, and the copy is checked instead. A packed shard that was
    rewritten with other HDF5 tools (chunks, compression) is accepted if shapes and dtypes agree with the manifest. An
    indexed file must have the size and modification time that the manifest states; for a copy the time is ignored.
    HDF5 opens the file only if the manifest does not state the location of all fields, or if the headers could not be
    compared with their hash. Raises DataError that names the shard, and the field if a field is the cause.
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
            end = layout.offset + _size_of(layout)
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
    """Returns True if the HDF5 headers agree with their hash, and False if they were not compared.

    The comparison comes before HDF5 reads the headers, since damaged headers can crash HDF5 (1.10.8). Headers are not
    compared if their hash is unknown, or if the size of the file differs from the manifest: such a file was rewritten
    or truncated. Headers of files with chunked data are not compared either: their hash covers the chunks, so the whole
    file would have to be read. Raises HeadersDamaged if the hash differs, or OSError.
    """
    extents = [(f.offset, f.num_bytes) for f in entry.fields.values() if f.offset is not None]
    if entry.structure_hash is None or len(extents) < len(entry.fields) or file_bytes != entry.file_bytes:
        return False
    if hash_outside_extents(descriptor, file_bytes=file_bytes, extents=extents) != entry.structure_hash:
        raise HeadersDamaged(f"shard {path}: {HEADERS_DIFFER}: restore it or {_again(manifest)}")
    return True


def check_unchanged(status: os.stat_result, *, entry: ShardEntry, path: Path, is_copy: bool = False) -> None:
    """Raises DataError if the size or modification time of an indexed file differs from the manifest.

    For a copy of the file (`is_copy`) the modification time is ignored.
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
    """Returns the error message for a file that is shorter than the manifest states.

    `found_bytes` is the size of the file in bytes.
    """
    return (
        f"shard {path} is cut short: {found_bytes} bytes, the manifest says {entry.file_bytes} "
        f"({entry.samples} samples): copy it again, or {'pack' if entry.modified_ns is None else 'index'} again"
    )


def _again(manifest: Manifest) -> str:
    return "index the files again" if manifest.indexed else "pack again"


def _size_of(layout: DatasetLayout) -> int:
    return int(np.prod(layout.shape, dtype=np.int64)) * layout.dtype.itemsize


def _trusted_layouts(manifest: Manifest, entry: ShardEntry) -> dict[str, DatasetLayout] | None:
    """Returns shape, dtype and offset of each field in the file, as the manifest states them. Reads no file.

    Returns None if the manifest does not state the layout of every field: if a field is not contiguous or not of kind
    `array`, or if an early version of hpctrain indexed the file without checking its HDF5 types.
    """
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
    """Raises DataError if the dtype or shape of a field's HDF5 dataset differs from the manifest."""
    spec, stored = manifest.fields[name], entry.fields[name]
    dtype, shape = layout.dtype, layout.shape
    if stored.member is not None:
        if dtype.names is None or stored.member not in dtype.names:
            raise DataError(
                f"dataset {stored.dataset!r} of shard {path} has no member {stored.member!r}: {_again(manifest)}"
            )
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
    """Returns the numpy name of the dtype of an HDF5 dataset, for the comparison with the manifest.

    The name is "string" for strings. For rows of variable length it is the name of the dtype of their elements.
    """
    import h5py

    if h5py.check_string_dtype(dtype) is not None:
        return "string"
    elements = h5py.check_vlen_dtype(dtype)
    if elements is not None and spec.kind == "ragged" and not whole:
        return str(np.dtype(elements).name)
    return dtype.name
