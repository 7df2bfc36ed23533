"""The commit header ("seal"): the first 4096 bytes of a checkpoint file, in HDF5's user block.

It holds the offset, length and hash of the metadata, and its own hash. A save writes it last; until then it is
zeros, so a file without a valid commit header is an unfinished save. With it, loading needs no HDF5 library, and
so the library never interprets the bytes of a damaged or malicious file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import CheckpointError
from hpctrain.storage import hash_of

SEAL_BYTES = 4096
FORMAT_VERSION = 2  # written by this version
READ_VERSIONS = (1, 2)
_MAGIC = b"hpctrain checkpoint\n"
_PART_MAGIC = b"hpctrain checkpoint part\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """Content of the commit header of a main file. Together with the extents' hashes it covers every byte.

    metadata_offset, metadata_bytes: position and length of the metadata, in bytes. file_bytes: length of the whole
    file. metadata_hash: hash of the metadata's bytes. structure_hash: hash of all bytes that are neither commit
    header, metadata nor tensor content, which are HDF5's own structures.
    """

    metadata_offset: int
    metadata_bytes: int
    metadata_hash: str
    structure_hash: str
    file_bytes: int


class UnknownFormatError(CheckpointError):
    """The commit header is valid, but another version of hpctrain wrote the checkpoint in an unknown format."""


def encode_seal(seal: Seal) -> bytes:
    """Returns the block of SEAL_BYTES bytes: a magic line, a line of JSON, the hash of both lines, zeros."""
    values = {
        "format": FORMAT_VERSION,
        "metadata_offset": seal.metadata_offset,
        "metadata_bytes": seal.metadata_bytes,
        "metadata_xxh3_64": seal.metadata_hash,
        "structure_xxh3_64": seal.structure_hash,
        "file_bytes": seal.file_bytes,
    }
    return _block(_MAGIC, values)


def _block(magic: bytes, values: dict[str, Any]) -> bytes:
    text = magic + json.dumps(values).encode() + b"\n"
    block = text + hash_of(text).encode() + b"\n"
    return block.ljust(SEAL_BYTES, b"\0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSeal:
    """Header of a part file (any but the main one): id and step of its checkpoint, and its number among `num_files`.

    It does not commit anything: the hashes of a part file are in the main file.
    """

    id: str
    step: int
    number: int
    num_files: int


def encode_part_seal(seal: PartSeal) -> bytes:
    """Returns the header block of a part file, SEAL_BYTES long."""
    return _block(
        _PART_MAGIC,
        {
            "format": FORMAT_VERSION,
            "id": seal.id,
            "step": seal.step,
            "number": seal.number,
            "files": seal.num_files,
        },
    )


def empty_part_block() -> bytes:
    return bytes(SEAL_BYTES)


def decode_seal(block: bytes, *, file_bytes: int) -> Seal:
    """Returns the decoded commit header of a file whose length is now `file_bytes`.

    Raises CheckpointError if it is missing, damaged, or records another file length, and UnknownFormatError if it
    is valid but of another format version.
    """
    if len(block) == SEAL_BYTES and not any(block):
        raise CheckpointError("the save of this file was never finished: its commit header (seal) is empty")
    lines = block.split(b"\n", 3)
    if len(block) != SEAL_BYTES or len(lines) != 4 or lines[0] + b"\n" != _MAGIC:
        raise CheckpointError("not an hpctrain checkpoint: it does not begin with a commit header (seal)")
    text = lines[0] + b"\n" + lines[1] + b"\n"
    if lines[2] != hash_of(text).encode() or any(lines[3]):
        raise CheckpointError("the commit header (seal) of the file is damaged: its hash does not match")
    try:
        values = json.loads(lines[1])
        version = values["format"]
        if version not in READ_VERSIONS:
            raise UnknownFormatError(
                f"the checkpoint has format {version!r}, this hpctrain reads formats 1 to {FORMAT_VERSION}: "
                "use the version that wrote it, or a newer one"
            )
        seal = Seal(
            metadata_offset=_natural(values["metadata_offset"]),
            metadata_bytes=_natural(values["metadata_bytes"]),
            metadata_hash=str(values["metadata_xxh3_64"]),
            structure_hash=str(values["structure_xxh3_64"]),
            file_bytes=_natural(values["file_bytes"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the commit header (seal) has invalid content: {error}") from error
    if seal.file_bytes != file_bytes:
        raise CheckpointError(f"the file is {file_bytes} bytes long, it was written with {seal.file_bytes}")
    if seal.metadata_offset < SEAL_BYTES or seal.metadata_offset + seal.metadata_bytes > file_bytes:
        raise CheckpointError(
            f"the commit header (seal) places the metadata at byte {seal.metadata_offset}, "
            f"{seal.metadata_bytes} bytes long, "
            f"which is outside the file of {file_bytes} bytes"
        )
    return seal


def _natural(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not an integer from 0 to 2^63 - 1")
    return value
