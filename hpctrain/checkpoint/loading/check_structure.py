"""Verifies all of a checkpoint except tensor content. One rank does this, without the HDF5 library.

Afterwards every byte of the files that is not tensor content has been verified by a hash.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.checkpoint.files.checkpoint_names import MAIN_FILE, step_of
from hpctrain.checkpoint.files.io_errors import explained, read_fully
from hpctrain.checkpoint.format.metadata import (
    MAX_METADATA_BYTES,
    SEAL_BYTES,
    Metadata,
    Seal,
    decode_metadata,
    decode_seal,
)
from hpctrain.errors import CheckpointError
from hpctrain.storage import hash_of

# HDF5's own structures: a superblock, object headers of a few hundred bytes, padding up to the next page.
_MAX_STRUCTURE_BYTES = 16 << 20
_MAX_STRUCTURE_BYTES_PER_TENSOR = 64 << 10
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The verified structure of a checkpoint.

    Attributes:
        path: The checkpoint, a file or a folder.
        main: Path of the checkpoint's main file, which contains the metadata.
        main_bytes: Length of the main file.
        metadata_text: The metadata as stored, to be sent to the other ranks.
        metadata: The decoded metadata.
    """

    path: Path
    main: Path
    main_bytes: int
    metadata_text: str
    metadata: Metadata


def is_checkpoint(path: Path) -> bool:
    """Returns True if `path` is one checkpoint, complete or not, rather than a directory of checkpoints.

    Not collective. A checkpoint is a file, or a folder that has the name or the main file of a checkpoint.

    Args:
        path: The path to look at. If the filesystem fails, the result is False, since opening the path then raises
            the error.
    """
    with suppress(OSError):
        return path.is_file() or (path.is_dir() and step_of(path) is not None) or (path / MAIN_FILE).is_file()
    return False


def open_regular(path: Path) -> int:
    """Opens a file for reading and returns its descriptor.

    Raises CheckpointError if `path` cannot be opened or is not a regular file.
    """
    with explained(action="open", path=path):
        # O_NONBLOCK: otherwise opening a pipe of that name would block for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
    if not is_regular:
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file")
    return fd


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yields a file descriptor for reading the file at `path`, and closes it at the end.

    Raises CheckpointError if `path` cannot be opened or is not a regular file.
    """
    fd = open_regular(path)
    try:
        yield fd
    finally:
        with suppress(OSError):  # fails on a dead mount; all that was read has been verified
            os.close(fd)


def read_structure(path: Path) -> Structure:
    """Verifies all of a checkpoint except tensor content, and returns its structure.

    The structure consists of commit header, metadata, and what HDF5 itself stores. Raises CheckpointError, with the
    checkpoint's path, if any of these bytes is not as it was written.
    """
    try:
        with explained(action="open", path=path):
            is_folder = path.is_dir()
        main = path / MAIN_FILE if is_folder else path
        if is_folder:
            _refuse_link(main)
        with opened(main) as fd, explained(action="read", path=main):
            main_bytes = os.fstat(fd).st_size
            seal = decode_seal(os.pread(fd, SEAL_BYTES, 0), file_bytes=main_bytes)
            if seal.metadata_bytes > MAX_METADATA_BYTES:
                raise CheckpointError(
                    f"the metadata is {seal.metadata_bytes} bytes long, the limit is {MAX_METADATA_BYTES}"
                )
            data = bytearray(seal.metadata_bytes)
            read_fully(fd, memoryview(data), offset=seal.metadata_offset)
            if hash_of(data) != seal.metadata_hash:
                raise CheckpointError("the metadata is damaged: its hash does not match")
            metadata = decode_metadata(bytes(data), file_bytes=main_bytes, byte_order=sys.byteorder)
            if metadata.parts and not is_folder:
                raise CheckpointError(
                    f"this is one of the {len(metadata.parts) + 1} files of a checkpoint: give the path of their folder"
                )
            places = content_places(metadata)
            taken = [(0, SEAL_BYTES), (seal.metadata_offset, seal.metadata_bytes), *places[0]]
            if hash_structure(fd, taken=taken, file_bytes=main_bytes) != seal.structure_hash:
                raise CheckpointError(
                    "HDF5's structures between the tensors are damaged: their hash does not match"
                )
            text = data.decode()
        for number, part in enumerate(metadata.parts, start=1):
            _refuse_link(path / part.name)
            check_part_file(
                path / part.name,
                taken=places[number],
                num_bytes=part.num_bytes,
                structure_hash=part.structure_hash,
            )
    except CheckpointError as error:
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise type(error)(message) from error
    return Structure(path=path, main=main, main_bytes=main_bytes, metadata_text=text, metadata=metadata)


def _refuse_link(path: Path) -> None:
    """Raises CheckpointError for a symbolic link: a folder of unknown origin must not make us read other files."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link: the files of a checkpoint must lie in its folder")


def content_places(metadata: Metadata) -> list[list[tuple[int, int]]]:
    """Returns for each file the byte ranges, (offset, length), that hold tensor content."""
    places: list[list[tuple[int, int]]] = [[] for _ in range(1 + len(metadata.parts))]
    for tensor in metadata.tensors.values():
        elem_bytes = tensor.elem_bytes
        for piece in tensor.pieces:
            if piece.box.num_elems:
                places[piece.file].append((piece.file_offset, piece.box.num_elems * elem_bytes))
    return places


def check_part_file(
    path: Path, *, taken: Sequence[tuple[int, int]], num_bytes: int, structure_hash: str
) -> None:
    """Verifies a part file of a checkpoint (any file but the main file), except the tensor content in it.

    `taken` contains the byte ranges, (offset, length), of the file's header and tensor content; `num_bytes` is the
    length that the file must have. Raises CheckpointError, with the path, if anything differs.
    """
    with opened(path) as fd, explained(action="read", path=path):
        found_bytes = os.fstat(fd).st_size
        if found_bytes != num_bytes:
            raise CheckpointError(f"{path} is {found_bytes} bytes long, it was written with {num_bytes}")
        try:
            found = hash_structure(fd, taken=taken, file_bytes=num_bytes)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if found != structure_hash:
            raise CheckpointError(f"{path}: its structure is damaged: the hash does not match")


def hash_structure(fd: int, *, taken: Sequence[tuple[int, int]], file_bytes: int) -> str:
    """Returns the hash of all bytes of a file that lie outside the byte ranges `taken`.

    `taken` contains (offset, length) of commit header, metadata and tensor content. Raises CheckpointError if two
    byte ranges overlap, or if more bytes lie outside them than a save can have written.
    """
    content_bytes = sum(num_bytes for _, num_bytes in taken)
    left_bytes = file_bytes - content_bytes
    # Padding to the stripes of a parallel filesystem can take as many bytes as the content.
    most = _MAX_STRUCTURE_BYTES + len(taken) * _MAX_STRUCTURE_BYTES_PER_TENSOR + content_bytes
    if not 0 <= left_bytes <= most:
        raise CheckpointError(
            f"{left_bytes} bytes of the file are neither metadata nor tensor content; a save writes 0 to {most}"
        )
    digest = xxhash.xxh3_64()
    position = 0
    for offset, num_bytes in [*sorted(taken), (file_bytes, 0)]:
        if offset < position:
            raise CheckpointError(
                f"the metadata is invalid: tensors or metadata overlap at byte {offset} of the file"
            )
        while position < offset:
            chunk = bytearray(min(_CHUNK_BYTES, offset - position))
            read_fully(fd, memoryview(chunk), offset=position)
            digest.update(chunk)
            position += len(chunk)
        position = offset + num_bytes
    return digest.hexdigest()


def check_sealed(path: Path, *, seal: Seal, structure: Sequence[tuple[int, int]]) -> None:
    """Reads back a file whose commit header was just written, and verifies all of it except tensor content.

    `structure` contains the byte ranges, (offset, length), of HDF5's structures. Raises CheckpointError if anything
    differs.
    """
    with opened(path) as fd, explained(action="read back", path=path):
        file_bytes = os.fstat(fd).st_size
        found = decode_seal(os.pread(fd, SEAL_BYTES, 0), file_bytes=file_bytes)
        metadata_hash = _hash_in(fd, [(seal.metadata_offset, seal.metadata_bytes)])
        read_back = replace(seal, metadata_hash=metadata_hash, structure_hash=_hash_in(fd, structure))
    if found != seal or read_back != seal:
        raise CheckpointError(f"{path} reads back other bytes than were written: the storage is not reliable")


def _hash_in(fd: int, byte_ranges: Sequence[tuple[int, int]]) -> str:
    """Returns the hash of the given byte ranges, (offset, length), of a file, in this order."""
    digest = xxhash.xxh3_64()
    memory = memoryview(bytearray(_CHUNK_BYTES))
    for offset, num_bytes in byte_ranges:
        for done in range(0, num_bytes, len(memory)):
            part = memory[: num_bytes - done]
            read_fully(fd, part, offset=offset + done)
            digest.update(part)
    return digest.hexdigest()


# The open files of one checkpoint while its content is read.


_MAX_OPEN = 128
# Small tensors lie close together: with `read_ahead`, a read of at most _SMALL_BYTES fetches _AHEAD_BYTES at once.
_AHEAD_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
_CACHED_BYTES = 512 << 10  # half of a core's private cache on most machines


@final
class ContentFiles:
    """Reads from the files of a checkpoint, for use by one thread.

    A file is opened at its first read; all are closed at the end of the `with` block.
    """

    def __init__(self, paths: Sequence[Path], *, read_ahead: bool = False) -> None:
        """`paths` contains the path of the main file, then the paths of the part files.

        The other methods refer to a file by its index in `paths`. Set `read_ahead` if nearly all bytes will be read,
        file after file and from the start of each file to its end.
        """
        self._paths = paths
        self._read_ahead = read_ahead
        self._open: dict[int, int] = {}
        self._window: tuple[int, int, memoryview] = (-1, 0, memoryview(b""))  # file, offset, bytes
        self._window_memory = bytearray()
        self._scratch = np.empty(0, dtype=np.uint8)
        self._gather_scratch = np.empty(0, dtype=np.uint8)

    def __enter__(self) -> ContentFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            with suppress(OSError):  # fails on a dead mount; all that was read has been verified
                os.close(fd)
        self._open.clear()

    def name(self, number: int) -> str:
        """Returns the name of file `number`, for messages that also name the checkpoint."""
        return "the file" if len(self._paths) == 1 else self._paths[number].name

    def read(self, number: int, buffer: memoryview, *, offset: int) -> None:
        """Fills `buffer` with the bytes of a file that begin at `offset`.

        Raises OSError, and CheckpointError if the file is too short.
        """
        if not self._read_ahead or buffer.nbytes > _SMALL_BYTES:
            read_fully(self._fd(number), buffer, offset=offset)
            return
        held, start, window = self._window
        if held != number or not start <= offset <= start + len(window) - buffer.nbytes:
            window = self._look_ahead(number, offset)
            start = offset
            if len(window) < buffer.nbytes:
                read_fully(self._fd(number), buffer, offset=offset)
                return
        buffer[:] = window[offset - start : offset - start + buffer.nbytes]

    def read_and_hash(self, number: int, buffer: memoryview, *, offset: int) -> str:
        """Fills `buffer` as `read` does, and returns the hash of the bytes.

        The bytes are hashed while they are still in the processor's cache.
        """
        if buffer.nbytes <= _CACHED_BYTES:
            self.read(number, buffer, offset=offset)
            return hash_of(buffer)
        fd = self._fd(number)
        digest = xxhash.xxh3_64()
        for start in range(0, buffer.nbytes, _CACHED_BYTES):
            part = buffer[start : start + _CACHED_BYTES]
            read_fully(fd, part, offset=offset + start)
            digest.update(part)
        return digest.hexdigest()

    def scratch(self, num_bytes: int) -> NDArray[Any]:
        """Returns memory for a range of elements that is read at once: uint8, shape (num_bytes,).

        The memory is valid until the next call.
        """
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._scratch[:num_bytes]

    def gather_scratch(self, num_bytes: int) -> NDArray[Any]:
        """Returns memory for the bytes of one extent, a region with one hash: uint8, shape (num_bytes,).

        The memory is valid until the next call.
        """
        if len(self._gather_scratch) < num_bytes:
            self._gather_scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._gather_scratch[:num_bytes]

    def _look_ahead(self, number: int, offset: int) -> memoryview:
        """Reads up to _AHEAD_BYTES bytes of file `number`, which begin at `offset`, and returns them.

        Returns no bytes after an error. The caller then reads by itself, which raises the error.
        """
        if not self._window_memory:
            self._window_memory = bytearray(_AHEAD_BYTES)
        try:
            count = os.preadv(self._fd(number), [self._window_memory], offset)
        except OSError:
            count = 0
        window = memoryview(self._window_memory)[:count]
        self._window = (number, offset, window)
        return window

    def _fd(self, number: int) -> int:
        fd = self._open.get(number)
        if fd is None:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            fd = self._open[number] = open_regular(self._paths[number])
        return fd
