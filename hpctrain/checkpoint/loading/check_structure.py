"""Open a checkpoint and check all of it but the tensors' content. One rank does this; no HDF5 library.

After this every byte of its files that is not a tensor's content has been compared with its hash.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from hpctrain.checkpoint.files.checkpoint_names import MAIN_FILE, step_of
from hpctrain.checkpoint.files.full_io import explained, read_fully
from hpctrain.checkpoint.format.commit_header import SEAL_BYTES, Seal, decode_seal
from hpctrain.checkpoint.format.content_hash import hash_of
from hpctrain.checkpoint.format.metadata import MAX_METADATA_BYTES, Metadata, decode_metadata
from hpctrain.errors import CheckpointError

# HDF5's own structures: a superblock, object headers of a few hundred bytes, padding up to the next page.
_MAX_STRUCTURE_BYTES = 16 << 20
_MAX_STRUCTURE_BYTES_PER_TENSOR = 64 << 10
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Structure:
    """path: of the checkpoint, a file or a folder. main: its main file, main_bytes long. metadata_text: as
    stored, for the other ranks."""

    path: Path
    main: Path
    main_bytes: int
    metadata_text: str
    metadata: Metadata


def is_checkpoint(path: Path) -> bool:
    """Whether this is one checkpoint, not a folder of checkpoints: a file, or a folder with its name or content.
    It need not be whole. Rank 0 asks; a filesystem that does not answer is left to whoever opens it."""
    with suppress(OSError):
        return path.is_file() or (path.is_dir() and step_of(path) is not None) or (path / MAIN_FILE).is_file()
    return False


def open_regular(path: Path) -> int:
    """A descriptor to read from. Raises CheckpointError when it is no regular file or cannot be opened."""
    with explained(action="open", path=path):
        # O_NONBLOCK: something with our name that is a pipe would otherwise block the open for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
    if not is_regular:
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file")
    return fd


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read from, closed at the end. Raises as `open_regular`."""
    fd = open_regular(path)
    try:
        yield fd
    finally:
        with suppress(OSError):  # a mount that has died fails here too; what was read has been checked
            os.close(fd)


def read_structure(path: Path) -> Structure:
    """Raises CheckpointError, naming the checkpoint, when anything in it is not as it was written."""
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
                raise CheckpointError(f"the metadata is said to be {seal.metadata_bytes} bytes long")
            data = bytearray(seal.metadata_bytes)
            read_fully(fd, memoryview(data), offset=seal.metadata_offset)
            if hash_of(data) != seal.metadata_hash:
                raise CheckpointError("the metadata is damaged: its hash does not fit")
            metadata = decode_metadata(bytes(data), file_bytes=main_bytes, byte_order=sys.byteorder)
            if metadata.parts and not is_folder:
                raise CheckpointError(
                    f"it is one of the {len(metadata.parts) + 1} files of a checkpoint: name their folder instead"
                )
            places = content_places(metadata)
            taken = [(0, SEAL_BYTES), (seal.metadata_offset, seal.metadata_bytes), *places[0]]
            if hash_structure(fd, taken=taken, file_bytes=main_bytes) != seal.structure_hash:
                raise CheckpointError(
                    "HDF5's structures between the tensors are damaged: the hash does not fit"
                )
            text = data.decode()
        for number, part in enumerate(metadata.parts, start=1):
            _refuse_link(path / part.name)
            check_part(
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
    """A folder of unknown origin must not have us read what lies elsewhere."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link: the files of a checkpoint's folder lie in it")


def content_places(metadata: Metadata) -> list[list[tuple[int, int]]]:
    """For each file, offset and length in bytes of what tensors hold of it."""
    places: list[list[tuple[int, int]]] = [[] for _ in range(1 + len(metadata.parts))]
    for tensor in metadata.tensors.values():
        elem_bytes = tensor.elem_bytes
        for piece in tensor.pieces:
            if piece.box.num_elems:
                places[piece.file].append((piece.file_offset, piece.box.num_elems * elem_bytes))
    return places


def check_part(path: Path, *, taken: Sequence[tuple[int, int]], num_bytes: int, structure_hash: str) -> None:
    """Check all but the tensors' content of a file beside the main one. Raises CheckpointError naming it."""
    with opened(path) as fd, explained(action="read", path=path):
        found_bytes = os.fstat(fd).st_size
        if found_bytes != num_bytes:
            raise CheckpointError(f"{path} is {found_bytes} bytes long, it was written with {num_bytes}")
        try:
            found = hash_structure(fd, taken=taken, file_bytes=num_bytes)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if found != structure_hash:
            raise CheckpointError(f"{path}: its structure is damaged: the hash does not fit")


def hash_structure(fd: int, *, taken: Sequence[tuple[int, int]], file_bytes: int) -> str:
    """Hash of all bytes of the file outside of `taken`: offset and length of the seal, the metadata, and content.

    Raises CheckpointError when two of these overlap, or when so much is left that we cannot have written it.
    """
    content_bytes = sum(num_bytes for _, num_bytes in taken)
    left_bytes = file_bytes - content_bytes
    # With stripes of a parallel filesystem the padding may be as much as the content.
    most = _MAX_STRUCTURE_BYTES + len(taken) * _MAX_STRUCTURE_BYTES_PER_TENSOR + content_bytes
    if not 0 <= left_bytes <= most:
        raise CheckpointError(f"{left_bytes} bytes of the file belong to nothing")
    digest = xxhash.xxh3_64()
    position = 0
    for offset, num_bytes in [*sorted(taken), (file_bytes, 0)]:
        if offset < position:
            raise CheckpointError(f"two things in the file overlap at byte {offset}")
        while position < offset:
            chunk = bytearray(min(_CHUNK_BYTES, offset - position))
            read_fully(fd, memoryview(chunk), offset=position)
            digest.update(chunk)
            position += len(chunk)
        position = offset + num_bytes
    return digest.hexdigest()


def check_sealed(path: Path, *, seal: Seal, structure: Sequence[tuple[int, int]]) -> None:
    """Read back a file that has just been sealed: all but the tensors' content. structure: (offset, bytes) of
    HDF5's structures. Raises CheckpointError where it is not as it was meant to be."""
    with opened(path) as fd, explained(action="read back", path=path):
        file_bytes = os.fstat(fd).st_size
        found = decode_seal(os.pread(fd, SEAL_BYTES, 0), file_bytes=file_bytes)
        metadata_hash = _hash_in(fd, [(seal.metadata_offset, seal.metadata_bytes)])
        read_back = replace(seal, metadata_hash=metadata_hash, structure_hash=_hash_in(fd, structure))
    if found != seal or read_back != seal:
        raise CheckpointError(
            f"{path} reads back otherwise than it was written: the storage is not to be trusted"
        )


def _hash_in(fd: int, stretches: Sequence[tuple[int, int]]) -> str:
    """Of the file's bytes in the stretches, (offset, bytes), one after the other."""
    digest = xxhash.xxh3_64()
    memory = memoryview(bytearray(_CHUNK_BYTES))
    for offset, num_bytes in stretches:
        for done in range(0, num_bytes, len(memory)):
            part = memory[: num_bytes - done]
            read_fully(fd, part, offset=offset + done)
            digest.update(part)
    return digest.hexdigest()
