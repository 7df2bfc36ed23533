"""The seal: the first 4096 bytes of a checkpoint file, outside HDF5's own structures (its "user block").

It says where the metadata lies and what its hash is, and is itself hashed. Zeros until the very end of a
save: a file without a valid seal was never finished. Because of it, loading needs no HDF5 library: nothing
that a damaged or hostile file holds is ever interpreted by one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.format.content_hash import hash_of
from hpctrain.errors import CheckpointError

SEAL_BYTES = 4096
FORMAT_VERSION = 2  # what we write
READ_VERSIONS = (1, 2)
_MAGIC = b"hpctrain checkpoint\n"
_PART_MAGIC = b"hpctrain checkpoint part\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal:
    """metadata_offset, metadata_bytes: its place, in bytes from the begin of the file. file_bytes: of the
    whole file. metadata_hash: of the metadata's bytes. structure_hash: of all bytes that are neither seal,
    metadata nor a tensor's content: HDF5's own structures. So each byte of the file is under some hash."""

    metadata_offset: int
    metadata_bytes: int
    metadata_hash: str
    structure_hash: str
    file_bytes: int


class UnknownFormatError(CheckpointError):
    """The checkpoint is whole, but another version of hpctrain wrote it in a format we do not know."""


def encode_seal(seal: Seal) -> bytes:
    """The block, SEAL_BYTES long: a magic line, a line of JSON, the hash of both, zeros."""
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
    """What a file that is not the main one says of itself: the id of its checkpoint, its step, its number among
    num_files. It vouches for nothing: the main file does."""

    id: str
    step: int
    number: int
    num_files: int


def encode_part_seal(seal: PartSeal) -> bytes:
    """The block, SEAL_BYTES long."""
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
    """The seal of a file that is `file_bytes` long now.

    Raises CheckpointError when it is missing, damaged, or speaks of a file of another length, and
    UnknownFormatError when it is sound and of another format version.
    """
    if len(block) == SEAL_BYTES and not any(block):
        raise CheckpointError("the file was never finished: its seal is empty")
    lines = block.split(b"\n", 3)
    if len(block) != SEAL_BYTES or len(lines) != 4 or lines[0] + b"\n" != _MAGIC:
        raise CheckpointError("not an hpctrain checkpoint: it does not begin with the seal")
    text = lines[0] + b"\n" + lines[1] + b"\n"
    if lines[2] != hash_of(text).encode() or any(lines[3]):
        raise CheckpointError("the seal at the begin of the file is damaged: its hash does not fit")
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
        raise CheckpointError(f"the seal cannot be understood: {error}") from error
    if seal.file_bytes != file_bytes:
        raise CheckpointError(f"the file is {file_bytes} bytes long, it was written with {seal.file_bytes}")
    if seal.metadata_offset < SEAL_BYTES or seal.metadata_offset + seal.metadata_bytes > file_bytes:
        raise CheckpointError(
            f"the seal places the metadata at {seal.metadata_offset}, {seal.metadata_bytes} bytes long, "
            f"which is outside the file of {file_bytes} bytes"
        )
    return seal


def _natural(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number from 0 to 2^63 - 1")
    return value
