"""The manifest: what a dataset directory holds, where the bytes are, and what they hash to.

A dataset is a directory with `manifest.json` and HDF5 shards beside it. The manifest is written last, so a
directory with shards and without a manifest is a dataset whose packing did not finish. Plain JSON, versioned,
with a checksum of its own content.
"""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from hpctrain.errors import DataError

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
SHARD_PREFIX = "shard-"
PARTIAL_SUFFIX = ".partial"
TOKENS_FIELD = "tokens"

# What a field may be: numpy's names. uint64 is left out, torch cannot compute with it.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("float16", "float32", "float64"),
)

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class Kind(str, Enum):
    """`samples`: one row of every field is a sample. `tokens`: samples are windows of one long stream."""

    SAMPLES = "samples"
    TOKENS = "tokens"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FieldSpec(_Model):
    """One field of a sample: numpy dtype name and shape, without the sample dimension."""

    dtype: str
    shape: tuple[Positive, ...]

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"dtype {value!r} is not one of {', '.join(DTYPES)}")
        return value

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the bytes that are hashed and written: little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class StoredField(_Model):
    """One field in one shard: the HDF5 dataset, its place in the file, and the hash of each block.

    hashes: xxh3_64 of consecutive blocks of `Manifest.block_bytes` of the dataset's little-endian row-major
    bytes; the last block may be shorter.
    """

    dataset: str
    offset: NonNegative
    num_bytes: NonNegative
    hashes: tuple[Hash, ...]


class ShardEntry(_Model):
    """One HDF5 file. structure_hash covers the bytes of the file that are in none of its datasets."""

    file: str
    samples: Positive
    file_bytes: Positive
    structure_hash: Hash
    fields: dict[str, StoredField]

    @field_validator("file")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        # A manifest from elsewhere must not make us read outside its directory.
        if not value or value in (".", "..") or "/" in value or "\0" in value:
            raise ValueError(f"shard file {value!r} is not a plain file name")
        return value


class TokenWindows(_Model):
    """How samples are cut from the stream: sample i holds tokens [i * stride, i * stride + window + 1)."""

    window: Positive
    stride: Positive

    def tokens_for(self, samples: int) -> int:
        """Tokens that `samples` consecutive windows span."""
        return (samples - 1) * self.stride + self.window + 1

    def windows_in(self, tokens: int) -> int:
        """Windows that fit in `tokens` consecutive tokens."""
        return 0 if tokens <= self.window else (tokens - self.window - 1) // self.stride + 1


class Manifest(_Model):
    """A whole dataset. `fields` describe one sample; for kind `tokens` that is a window of window + 1."""

    version: Literal[1] = 1
    kind: Kind
    samples: Positive
    block_bytes: Positive
    fields: dict[str, FieldSpec]
    tokens: TokenWindows | None = None
    attributes: dict[str, JsonValue] = Field(default_factory=dict)
    shards: tuple[ShardEntry, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if not self.fields or not self.shards:
            raise ValueError("a dataset has at least one field and one shard")
        if (self.kind is Kind.TOKENS) != (self.tokens is not None):
            raise ValueError("window and stride belong to kind 'tokens', and only to it")
        if self.tokens is not None:
            spec = self.fields.get(TOKENS_FIELD)
            if len(self.fields) != 1 or spec is None or spec.shape != (self.tokens.window + 1,):
                raise ValueError(f"kind 'tokens' has one field {TOKENS_FIELD!r} of shape (window + 1,)")
        total = sum(shard.samples for shard in self.shards)
        if total != self.samples:
            raise ValueError(f"{self.samples} samples in all, but the shards add up to {total}")
        if len({shard.file for shard in self.shards}) != len(self.shards):
            raise ValueError("a shard is listed twice")
        for shard in self.shards:
            self._check_shard(shard)
        return self

    def _check_shard(self, shard: ShardEntry) -> None:
        if set(shard.fields) != set(self.fields):
            raise ValueError(
                f"shard {shard.file} has fields {', '.join(sorted(shard.fields))}; "
                f"the dataset has {', '.join(sorted(self.fields))}"
            )
        for name, stored in shard.fields.items():
            expected = self.stored_bytes(name, samples=shard.samples)
            if stored.num_bytes != expected:
                raise ValueError(
                    f"field {name!r} of shard {shard.file} has {stored.num_bytes} bytes, "
                    f"{shard.samples} samples make {expected}"
                )
            if stored.offset + stored.num_bytes > shard.file_bytes:
                raise ValueError(f"field {name!r} of shard {shard.file} ends behind the end of the file")
            blocks = -(-stored.num_bytes // self.block_bytes)
            if len(stored.hashes) != blocks:
                raise ValueError(
                    f"field {name!r} of shard {shard.file} has {len(stored.hashes)} hashes, not {blocks}"
                )

    def stored_shape(self, name: str, *, samples: int) -> tuple[int, ...]:
        """Shape of the HDF5 dataset that holds field `name` of a shard with that many samples."""
        if self.tokens is not None:
            return (self.tokens.tokens_for(samples),)
        return (samples, *self.fields[name].shape)

    def stored_bytes(self, name: str, *, samples: int) -> int:
        """Bytes of that HDF5 dataset."""
        shape = self.stored_shape(name, samples=samples)
        return int(np.prod(shape, dtype=np.int64)) * np.dtype(self.fields[name].dtype).itemsize

    @property
    def fingerprint(self) -> str:
        """Tells datasets apart: a hash over fields, counts and the hashes of all content."""
        return _checksum(self.model_dump(mode="json"))

    @property
    def file_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.file_bytes for shard in self.shards)


def _checksum(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def write_manifest(manifest: Manifest, *, directory: Path) -> None:
    """Write `manifest.json` atomically: temporary name, fsync, rename, fsync of the directory."""
    document = manifest.model_dump(mode="json")
    document["checksum"] = _checksum(document)
    partial = directory / f".{MANIFEST_NAME}{PARTIAL_SUFFIX}"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(directory / MANIFEST_NAME)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, as rename(2) alone does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(directory: Path | str) -> Manifest:
    """The manifest of the dataset in `directory`.

    Raises DataError: no such directory, no dataset in it, packing unfinished, JSON that cannot be read, a
    newer version, a changed checksum, or fields and counts that do not fit together.
    """
    directory = Path(directory)
    path = directory / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(_explain_missing(directory)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the manifest {path} cannot be read: {error}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the manifest {path} is no JSON ({error}): it is damaged; restore it or pack again"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("version"), int):
        raise DataError(f"{path} is no hpctrain manifest: it has no version")
    if document["version"] > MANIFEST_VERSION:
        raise DataError(
            f"{path} is of version {document['version']}, this hpctrain reads up to {MANIFEST_VERSION}: "
            "update hpctrain, or pack again with this one"
        )
    checksum = document.pop("checksum", None)
    if checksum != _checksum(document):
        raise DataError(
            f"the manifest {path} was changed since it was written (checksum {checksum}): "
            "restore it, or pack again"
        )
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(
            f"the manifest {path} is not valid{f', at {place}' if place else ''}: {first['msg']}"
        ) from None


def _explain_missing(directory: Path) -> str:
    if not directory.exists():
        return (
            f"no dataset at {directory}: there is no such directory (hpctrain data pack SOURCE OUT makes one)"
        )
    if not directory.is_dir():
        return (
            f"no dataset at {directory}: it is no directory (a dataset is a directory with {MANIFEST_NAME})"
        )
    below = sorted(child.name for child in directory.iterdir() if (child / MANIFEST_NAME).exists())
    if below:
        return f"no {MANIFEST_NAME} in {directory}, but datasets below it: name one of {', '.join(below)}"
    if any(SHARD_PREFIX in child.name for child in directory.iterdir()):
        return (
            f"the dataset at {directory} is unfinished: shards, but no {MANIFEST_NAME}; "
            "pack it again with --overwrite"
        )
    return f"no dataset at {directory}: it has no {MANIFEST_NAME} (hpctrain data pack SOURCE OUT makes one)"
