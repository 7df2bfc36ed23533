"""Finds the content of archives that torch.save wrote, without unpickling and without reading tensors into memory.

An archive is a zip file whose records are not compressed: `data.pkl`, the description, and `data/K`, the bytes of
storage K. Source: "Serialized file format for torch.save" in torch's notes on serialization semantics.
"""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import pickletools
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.dtypes import dtype_named
from hpctrain.checkpoint.loading.check_structure import opened
from hpctrain.errors import CheckpointError

# Reads a pickle as plain data, without unpickling it: no name in it is looked up, and nothing is called.
#
# A pickle is a program for a small stack machine. Of its instructions those that build plain data are
# followed here. Where an unpickler would import a name, call it, or change an object, a `Record` notes the
# name and its arguments. So a hostile file can at most contain records that the caller does not expect.
# `pickletools` of the standard library decodes the instructions.


_MARK = object()
_TEXT = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_VALUES = {*_TEXT, "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STORES = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}


@dataclass(eq=False, slots=True)
class Record:
    """Stands for an object in a pickle: what an unpickler would create by calling a function or a class.

    Nothing is called or created. `name` is the name of the function or class, "module.name", and `args` are the
    arguments; if `args` is None, the record stands for the function or class itself. `state` is what the unpickler
    would then pass to `__setstate__` or put into `__dict__`.
    """

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None


def read_pickled_data(content: bytes | memoryview, *, where: str) -> Any:
    """Reads a pickle without running anything in it. Returns dicts, lists, tuples, text, numbers, bool, None, records.

    A record (`Record`) stands for any other object. `where` says in error messages where the pickle comes from. Lists
    and dicts may contain themselves. A storage of torch is represented by a record with the name "persistent id".
    Raises CheckpointError if the pickle is invalid or contains an instruction that such values do not need.
    """
    try:
        return _run(bytes(content))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    # A hostile program can cause any of these in pickletools and below.
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{where} is not a valid pickle: {type(error).__name__}: {error}") from error


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any

    def after_mark() -> list[Any]:
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                found = stack[place + 1 :]
                del stack[place:]
                return found
        raise ValueError("an instruction refers to a mark that is not there")

    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _STORES:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            stack.append(tuple(after_mark()))
        elif name in ("SETITEM", "SETITEMS"):
            items = after_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            _changed(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = after_mark() if name == "APPENDS" else [stack.pop()]
            _changed(stack[-1], list).extend(items)
        elif name == "GLOBAL":
            stack.append(Record(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Record(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            args, called = stack.pop(), stack.pop()
            if not isinstance(called, Record) or not isinstance(args, tuple):
                raise CheckpointError("the pickle calls a value that is not a name of a class or function")
            stack.append(_called(called, args))
        elif name == "BUILD":
            state = stack.pop()
            if type(stack[-1]) is not dict:  # attributes of an OrderedDict, such as those of a state dict
                _changed(stack[-1], Record).state = state
        elif name == "BINPERSID":
            stack.append(Record("persistent id", (stack.pop(),)))
        elif name == "STOP":
            (value,) = stack
            return value
        elif name not in ("PROTO", "FRAME"):
            raise CheckpointError(
                f"the pickle has the instruction {name}, which no checkpoint of torch needs"
            )
    raise ValueError("the pickle does not end with STOP")


def _called(function: Record, args: tuple[Any, ...]) -> Any:
    """Returns the `Record` that stands for the result of calling `function` with `args`; nothing is called.

    For collections.OrderedDict() returns an empty dict instead. Its items follow in the pickle.
    """
    if function.name == "collections.OrderedDict" and not args:
        return {}
    return Record(function.name, args)


def _changed(value: Any, kind: type[Any]) -> Any:
    if type(value) is Record and kind in (dict, list):
        return kind()  # an object of another class: its items are not looked at
    if type(value) is not kind:
        raise CheckpointError(f"the pickle changes a {type(value).__name__} as if it were a {kind.__name__}")
    return value


# Finds the content of archives that torch.save wrote, without unpickling and without reading tensors into
# memory.


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
_PARAMETER = "torch._utils._rebuild_parameter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A tensor in an archive, and where its elements lie.

    `file_offset` and `num_bytes` are the position and length of its storage in the file, in bytes. `first` is the
    position of the tensor's first element in the storage, `strides` are the tensor's strides, both in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    file_offset: int
    num_bytes: int
    first: int
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An opened archive of torch.save (a zip file): its bytes, its offset in the file, and its records.

    A record is a member of the zip file. `records` maps each record's name to its offset in the archive, its length in
    bytes and its CRC-32.
    """

    content: memoryview
    begin: int
    records: dict[str, tuple[int, int, int]]

    def read(self, name: str, *, verify: bool) -> memoryview:
        begin, num_bytes, _ = self._record(name)
        if num_bytes > MAX_DESCRIPTION_BYTES:
            raise CheckpointError(
                f"the archive's record {name!r} has {num_bytes} bytes; the limit is {MAX_DESCRIPTION_BYTES}"
            )
        if verify:
            self.check(name)
        return self.content[begin : begin + num_bytes]

    def check(self, name: str) -> None:
        """Raises CheckpointError unless the bytes of the record `name` have the CRC-32 in the archive's directory.

        A record is a member of the zip file.
        """
        begin, num_bytes, expected = self._record(name)
        found = 0
        for start in range(begin, begin + num_bytes, _CHECK_BYTES):
            found = zlib.crc32(self.content[start : min(start + _CHECK_BYTES, begin + num_bytes)], found)
        if found != expected:
            raise CheckpointError(
                f"the archive's record {name!r} is damaged: its CRC-32 is {found:08x}, not {expected:08x}. "
                "A file written after torch.serialization.set_crc32_options(False) has none: "
                "import it with --no-verify (verify=False)"
            )

    def place(self, name: str) -> tuple[int, int]:
        """Returns offset in the file and length, in bytes, of the record (member of the zip file) called `name`."""
        first, num_bytes, _ = self._record(name)
        return self.begin + first, num_bytes

    def _record(self, name: str) -> tuple[int, int, int]:
        if name not in self.records:
            raise CheckpointError(f"the archive has no record {name!r}")
        return self.records[name]

    def description(self, *, verify: bool) -> Any:
        """Returns the value that torch.save wrote, without unpickling it (see `read_pickled_data`).

        Objects, such as tensors, are represented by a `Record`. With `verify`, the bytes are compared with the
        archive's CRC-32.
        """
        return read_pickled_data(self.read("data.pkl", verify=verify), where="data.pkl")

    def locate(self, value: Any, *, verify: bool) -> Located:
        """Returns where the elements of a tensor in the archive lie in the file.

        `value` stands for the tensor in the result of `description`. Raises CheckpointError unless the tensor is plain
        and dense.

        With `verify`, the content is also compared with the archive's CRC-32.
        """
        order = self.read("byteorder", verify=verify) if "byteorder" in self.records else None
        if order is not None and order != sys.byteorder.encode():
            raise CheckpointError(
                f"the archive's numbers are not {sys.byteorder}-endian, as this machine's are"
            )
        while isinstance(value, Record) and value.name.startswith(_PARAMETER) and value.args:
            value = value.args[0]
        kind, args = (value.name, value.args) if isinstance(value, Record) else (type(value).__name__, None)
        if kind not in (f"{_REBUILD}2", f"{_REBUILD}3") or args is None or len(args) < 6:
            raise CheckpointError(
                f"the archive holds {kind}, not a plain dense tensor: nothing in the archive was run"
            )
        storage, first, size, strides = args[:4]
        if isinstance(size, Record) and size.name == "torch.Size" and size.args is not None:
            (size,) = size.args
        is_untyped = kind.endswith("3")
        more = args[7:] if is_untyped else args[6:]
        if any(more):
            raise CheckpointError(
                f"the archive holds a tensor with properties that cannot be stored: {more!r:.100}"
            )
        if storage.name != "persistent id" or len(storage.args[0]) != 5 or storage.args[0][0] != "storage":
            raise CheckpointError("the tensor in the archive has no storage")
        kind, name = storage.args[0][1].name, storage.args[0][2]
        dtype = args[6].name.removeprefix("torch.") if is_untyped else _DTYPE_OF_STORAGE.get(kind, kind)
        record, elem_bytes = f"data/{name}", dtype_named(dtype).itemsize
        offset, num_bytes = self.place(record)
        last = first + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        if math.prod(size) and (min(first, *strides, 0) < 0 or (last + 1) * elem_bytes > num_bytes):
            raise CheckpointError(f"the tensor does not lie inside its storage of {num_bytes} bytes")
        if math.prod(size) * elem_bytes > num_bytes:
            raise CheckpointError(
                "the tensor repeats elements (a stride is 0 or too small): it cannot be stored"
            )
        if verify:
            self.check(record)
        return Located(
            dtype=dtype, shape=tuple(size), file_offset=offset, num_bytes=num_bytes, first=first,
            strides=tuple(strides),
        )  # fmt: skip


@contextmanager
def open_archive(path: Path, *, begin: int = 0, num_bytes: int | None = None) -> Iterator[Archive]:
    """Opens the archive of torch.save at byte `begin` of a file, for a `with` block.

    `num_bytes` is the length of the archive; None: the archive extends to the end of the file.

    Raises CheckpointError if the archive is invalid. The message of the error names the archive, also for errors that
    are raised in the block.
    """
    where = f"{path}, archive at byte {begin}" if num_bytes is not None else str(path)
    try:
        with opened(path) as fd, explained(action="map", path=path):
            mapped = mmap.mmap(fd, 0 if num_bytes is None else begin + num_bytes, prot=mmap.PROT_READ)
        yield _open(memoryview(mapped)[begin:], begin=begin)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    # A damaged or hostile archive can cause any of these.
    except _DAMAGE as error:
        raise CheckpointError(
            f"{where}: damaged, or not written by torch.save: {type(error).__name__}: {error}"
        ) from error


def mapped_tensor(file: NDArray[Any], place: Located, *, where: str) -> torch.Tensor:
    """Returns the tensor at `place` in a memory-mapped file, without a copy.

    `file` contains the bytes of the file: uint8, shape (length of the file,). Do not write to the tensor: the memory is
    mapped read-only. `where` is the file's name for messages. Raises CheckpointError if the file has become shorter.
    """
    elem_bytes = dtype_named(place.dtype).itemsize
    num_bytes = place.num_bytes - place.num_bytes % elem_bytes
    if place.file_offset + num_bytes > len(file):
        raise CheckpointError(f"{where} has become shorter: does another program write to it?")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it is not writable
        storage = torch.from_numpy(file[place.file_offset : place.file_offset + num_bytes])
        return storage.view(dtype_named(place.dtype)).as_strided(place.shape, place.strides, place.first)


class _Bytes(io.RawIOBase):
    """A readable file whose bytes are `content`, without a copy."""

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


def _open(content: memoryview, *, begin: int) -> Archive:
    """Opens the archive of torch.save whose bytes are `content`, and which begins at byte `begin` of its file.

    The module zipfile gets these bytes alone, without archives that precede it in the file: since the fix of
    CVE-2025-8291 (CPython 3.13.5 of Debian 13, 3.14) it refuses some archives that have other bytes before them.
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
            raise CheckpointError(
                f"the archive's record {entry.filename!r} is not where the archive's directory says"
            )
        name_bytes, extra_bytes = (
            int.from_bytes(content[header + at : header + at + 2], "little") for at in (26, 28)
        )
        first = header + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if first + entry.file_size > len(content):
            raise CheckpointError(f"the archive's record {entry.filename!r} ends after the archive")
        # All records lie in one folder, whose name is arbitrary.
        found[entry.filename.partition("/")[2]] = (first, entry.file_size, entry.CRC)
    return Archive(content=content, begin=begin, records=found)
