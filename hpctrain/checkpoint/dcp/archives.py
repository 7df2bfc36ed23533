"""Finds the content of archives that torch.save wrote, without unpickling and without reading tensors into memory.

An archive is a zip file whose records are not compressed: `data.pkl`, the description, and `data/K`, the bytes of
storage K. See "Serialized file format for torch.save" in torch's notes on serialization semantics.
"""

from __future__ import annotations

import errno
import io
import json
import math
import mmap
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from hpctrain.checkpoint.dcp.metadata import Place
from hpctrain.checkpoint.dcp.pickled_data import Record, read_pickled_data
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.dtypes import dtype_named
from hpctrain.checkpoint.loading.check_structure import opened
from hpctrain.errors import CheckpointError

MAX_DESCRIPTION_BYTES = 64 << 20
_LOCAL_HEADER_BYTES = 30  # of a zip file, before name and extra field
_CHECK_BYTES = 16 << 20

# Storage classes of torch that stand for a dtype. Other dtypes are arguments of their own, next to an UntypedStorage.
_DTYPE_OF_STORAGE = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.ComplexFloatStorage": "complex64",
}
_DAMAGE = (
    zipfile.BadZipFile, ValueError, TypeError, AttributeError, LookupError, OverflowError, NotImplementedError,
)  # fmt: skip
_REBUILD = "torch._utils._rebuild_tensor_v"


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """Where a tensor's storage lies in its file, in bytes, and how the tensor lies in it, in elements."""

    file_offset: int
    num_bytes: int
    first: int
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Archive:
    """content: the archive's bytes. begin: its offset in the file. records: (offset in the archive, bytes, CRC-32) by
    name."""

    content: memoryview
    begin: int
    records: dict[str, tuple[int, int, int]]

    def read(self, name: str, *, verify: bool) -> memoryview:
        begin, num_bytes, _ = self._record(name)
        if num_bytes > MAX_DESCRIPTION_BYTES:
            raise CheckpointError(f"its record {name!r} has {num_bytes} bytes")
        if verify:
            self.check(name)
        return self.content[begin : begin + num_bytes]

    def check(self, name: str) -> None:
        """Raises CheckpointError if the record's bytes do not have the CRC-32 of the archive's directory."""
        begin, num_bytes, expected = self._record(name)
        found = 0
        for start in range(begin, begin + num_bytes, _CHECK_BYTES):
            found = zlib.crc32(self.content[start : min(start + _CHECK_BYTES, begin + num_bytes)], found)
        if found != expected:
            raise CheckpointError(
                f"its record {name!r} is damaged: its CRC-32 is {found:08x}, not {expected:08x}. A file written after "
                "torch.serialization.set_crc32_options(False) has none: import it with --no-verify (verify=False)"
            )

    def place(self, name: str) -> tuple[int, int]:
        """Returns the record's offset in the file, and its bytes."""
        first, num_bytes, _ = self._record(name)
        return self.begin + first, num_bytes

    def _record(self, name: str) -> tuple[int, int, int]:
        if name not in self.records:
            raise CheckpointError(f"it has no record {name!r}")
        return self.records[name]


def locate_tensor(
    directory: Path, place: Place, *, dtype: str, shape: Sequence[int], verify: bool
) -> Located:
    """Returns where the tensor in an archive lies. Raises CheckpointError if it is not one of this dtype and shape.

    verify: compare the content with the archive's CRC-32.
    """
    with _archive(directory, place) as archive:
        value = read_pickled_data(archive.read("data.pkl", verify=verify), where="data.pkl")
        order = archive.read("byteorder", verify=verify) if "byteorder" in archive.records else None
        if order is not None and order != sys.byteorder.encode():
            raise CheckpointError(f"its numbers are not {sys.byteorder}-endian as this machine's")
        kind, args = (value.name, value.args) if isinstance(value, Record) else (type(value).__name__, None)
        if kind not in (f"{_REBUILD}2", f"{_REBUILD}3") or args is None or len(args) < 6:
            raise CheckpointError(f"it holds {kind}, not a plain dense tensor: nothing of it was run")
        storage, first, size, strides = args[:4]
        if isinstance(size, Record) and size.name == "torch.Size" and size.args is not None:
            (size,) = size.args
        is_untyped = kind.endswith("3")
        more = args[7:] if is_untyped else args[6:]
        if any(more):
            raise CheckpointError(f"it holds a tensor with properties that cannot be stored: {more!r:.100}")
        if storage.name != "persistent id" or len(storage.args[0]) != 5 or storage.args[0][0] != "storage":
            raise CheckpointError("its tensor has no storage")
        kind, name = storage.args[0][1].name, storage.args[0][2]
        found = args[6].name.removeprefix("torch.") if is_untyped else _DTYPE_OF_STORAGE.get(kind, kind)
        if found != dtype or tuple(size) != tuple(shape):
            raise CheckpointError(f"it holds {found} {list(size)}, not {dtype} {list(shape)}")
        record = f"data/{name}"
        offset, num_bytes = archive.place(record)
        last = first + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        if min(first, *strides, 0) < 0 or (last + 1) * dtype_named(dtype).itemsize > num_bytes:
            raise CheckpointError(f"its tensor does not lie inside its {num_bytes} bytes")
        if math.prod(shape) * dtype_named(dtype).itemsize > num_bytes:
            raise CheckpointError("its tensor repeats elements")
        if verify:
            archive.check(record)
    return Located(file_offset=offset, num_bytes=num_bytes, first=first, strides=tuple(strides))


def read_object(directory: Path, place: Place, *, verify: bool) -> Any:
    """Returns the value that torch.save wrote, as `read_pickled_data` does. Raises CheckpointError."""
    with _archive(directory, place) as archive:
        return read_pickled_data(archive.read("data.pkl", verify=verify), where="data.pkl")


def as_json(value: Any) -> Any:
    """Returns plain data as JSON has it, tuples as lists. Raises CheckpointError if it is not plain data."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not plain data: {error}") from error


@contextmanager
def _archive(directory: Path, place: Place) -> Iterator[_Archive]:
    """Yields the archive at `place`. Errors in the block name it."""
    path = directory / place.file
    try:
        with opened(path) as fd, explained(action="map", path=path):
            mapped = mmap.mmap(fd, place.begin + place.num_bytes, prot=mmap.PROT_READ)
        yield _open(memoryview(mapped)[place.begin :], begin=place.begin)
    except CheckpointError as error:
        raise CheckpointError(f"{path}, archive at byte {place.begin}: {error}") from error
    # A damaged or hostile archive can cause any of these.
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path}, archive at byte {place.begin}: damaged, or not written by torch.save: "
            f"{type(error).__name__}: {error}"
        ) from error


class _Bytes(io.RawIOBase):
    """A file for reading that has the bytes of `content`, which are not copied."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "a position before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._content[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def _open(content: memoryview, *, begin: int) -> _Archive:
    """Returns the archive whose bytes are `content`.

    zipfile is given these bytes alone, not the archives before it in the file too: since the fix of CVE-2025-8291
    (CPython 3.13.5 of Debian 13, 3.14) it refuses some archives that have other bytes before them.
    """
    found = {}
    try:
        with zipfile.ZipFile(cast(IO[bytes], _Bytes(content))) as archive:
            entries = archive.infolist()
    except OSError as error:  # of a position that a damaged directory names
        raise zipfile.BadZipFile(str(error)) from error
    for entry in entries:
        header = entry.header_offset
        is_record = header >= 0 and bytes(content[header : header + 4]) == b"PK\x03\x04"
        if not is_record or entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"its record {entry.filename!r} is not where the archive's directory says")
        name_bytes, extra_bytes = (
            int.from_bytes(content[header + at : header + at + 2], "little") for at in (26, 28)
        )
        first = header + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if first + entry.file_size > len(content):
            raise CheckpointError(f"its record {entry.filename!r} ends after the archive")
        # All records lie in one folder, whose name is arbitrary.
        found[entry.filename.partition("/")[2]] = (first, entry.file_size, entry.CRC)
    return _Archive(content=content, begin=begin, records=found)
