"""Open a checkpoint file and check all of it but the tensors' content. One rank does this; no HDF5 library.

After this every byte of the file that is not a tensor's content has been compared with its hash.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpctrain.checkpoint.file_bytes import explained, read_fully
from hpctrain.checkpoint.hashing import hash_of
from hpctrain.checkpoint.metadata import MAX_METADATA_BYTES, Metadata, StoredTensor, decode_metadata
from hpctrain.checkpoint.seal import SEAL_BYTES, Seal, decode_seal
from hpctrain.errors import CheckpointError

# HDF5's own structures: a superblock, object headers of a few hundred bytes, padding up to the next page.
_MAX_STRUCTURE_BYTES = 16 << 20
_MAX_STRUCTURE_BYTES_PER_TENSOR = 64 << 10
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Structure:
    """metadata_text: as stored, for the other ranks."""

    path: Path
    file_bytes: int
    metadata_text: str
    metadata: Metadata


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read from, closed at the end. Raises CheckpointError when it is no regular file."""
    with explained(action="open", path=path):
        # O_NONBLOCK: something with our name that is a pipe would otherwise block the open for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def read_structure(path: Path) -> Structure:
    """Raises CheckpointError, naming the file, when anything in it is not as it was written."""
    try:
        with opened(path) as fd, explained(action="read", path=path):
            file_bytes = os.fstat(fd).st_size
            seal = decode_seal(os.pread(fd, SEAL_BYTES, 0), file_bytes=file_bytes)
            if seal.metadata_bytes > MAX_METADATA_BYTES:
                raise CheckpointError(f"the metadata is said to be {seal.metadata_bytes} bytes long")
            data = bytearray(seal.metadata_bytes)
            read_fully(fd, memoryview(data), offset=seal.metadata_offset)
            if hash_of(data) != seal.metadata_hash:
                raise CheckpointError("the metadata is damaged: its hash does not fit")
            metadata = decode_metadata(bytes(data), file_bytes=file_bytes, byte_order=sys.byteorder)
            found = hash_structure(
                fd,
                tensors=metadata.tensors.values(),
                metadata_offset=seal.metadata_offset,
                metadata_bytes=seal.metadata_bytes,
                file_bytes=file_bytes,
            )
            if found != seal.structure_hash:
                raise CheckpointError(
                    "HDF5's structures between the tensors are damaged: the hash does not fit"
                )
            text = data.decode()
    except CheckpointError as error:
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise type(error)(message) from error
    return Structure(path=path, file_bytes=file_bytes, metadata_text=text, metadata=metadata)


def hash_structure(
    fd: int, *, tensors: Iterable[StoredTensor], metadata_offset: int, metadata_bytes: int, file_bytes: int
) -> str:
    """Hash of all bytes of the file that belong neither to the seal, nor the metadata, nor any tensor.

    Raises CheckpointError when two of these overlap, or when so much is left that we cannot have written it.
    """
    taken = [(0, SEAL_BYTES), (metadata_offset, metadata_bytes)]
    taken += [(tensor.pieces[0].file_offset, tensor.num_bytes) for tensor in tensors if tensor.num_bytes]
    left_bytes = file_bytes - sum(num_bytes for _, num_bytes in taken)
    if not 0 <= left_bytes <= _MAX_STRUCTURE_BYTES + len(taken) * _MAX_STRUCTURE_BYTES_PER_TENSOR:
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


def make_seal(path: Path, *, metadata: Metadata, data: bytes, metadata_offset: int) -> Seal:
    """The seal of a file in which all but the seal is in place."""
    with opened(path) as fd, explained(action="read back", path=path):
        file_bytes = os.fstat(fd).st_size
        return Seal(
            metadata_offset=metadata_offset,
            metadata_bytes=len(data),
            metadata_hash=hash_of(data),
            structure_hash=hash_structure(
                fd,
                tensors=metadata.tensors.values(),
                metadata_offset=metadata_offset,
                metadata_bytes=len(data),
                file_bytes=file_bytes,
            ),
            file_bytes=file_bytes,
        )
