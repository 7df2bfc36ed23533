"""The manifest of a dataset directory: lists its content, the location of the data in the files, and their hashes.

A dataset is a directory with `manifest.json` and HDF5 shards. The manifest is written last: in a directory with
shards but no manifest, packing has not finished. The manifest is a JSON file. The file has a version and a checksum of
its content.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, JsonValue, ValidationError, model_validator

from hpctrain.data.format.manifest_entries import (
    DTYPES,
    LENGTH_SUFFIX,
    NOT_IN_VERSION_1,
    NOT_IN_VERSION_2,
    Decoding,
    FieldSpec,
    FieldStatistics,
    Model,
    Positive,
    ShardEntry,
    StoredField,
    TokenWindows,
    WindowList,
    decoded_fields,
)
from hpctrain.errors import DataError
from hpctrain.storage import hash_of, replace_file, sync_directory

__all__ = [
    "DTYPES",
    "LENGTH_SUFFIX",
    "MANIFEST_NAME",
    "MANIFEST_VERSION",
    "PARTIAL_SUFFIX",
    "SHARD_PREFIX",
    "TOKENS_FIELD",
    "TYPES_CHECKED",
    "Decoding",
    "FieldSpec",
    "FieldStatistics",
    "Kind",
    "Manifest",
    "ShardEntry",
    "StoredField",
    "TokenWindows",
    "WindowList",
    "read_manifest",
    "write_manifest",
]

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 3
SHARD_PREFIX = "shard-"
PARTIAL_SUFFIX = ".partial"
TOKENS_FIELD = "tokens"
# Attribute of an index that records offsets only for datasets whose HDF5 type has the properties of numpy's dtype.
TYPES_CHECKED = "types_checked"


class Kind(str, Enum):
    """What a sample of a dataset consists of.

    SAMPLES: One row of every field.
    TOKENS: One window of a token stream.
    """

    SAMPLES = "samples"
    TOKENS = "tokens"


class Manifest(Model):
    """Describes a dataset: its fields, its shards, the location of each field in the shards, and the hashes.

    Attributes:
        version: Version of the format: 3 for a dataset with decoded fields, else 2. Version 1 can be read, but is no
            longer written.
        kind: Whether samples are rows of the fields or windows of a token stream.
        samples: Number of samples.
        block_bytes: Size of the blocks that are hashed, in bytes.
        fields: The fields of one sample by name, as they are stored, before decoding. For kind `tokens` there is one
            field, of window + 1 tokens.
        tokens: How windows are cut from the token stream; None for kind `samples`.
        windows: File that lists the index of the first token of each window, if no window may cross the start of a
            document; else None.
        indexed: True if the shards are existing files that were indexed in place. Their paths may then lead out of the
            directory.
        decoding: How the values of each decoded field are represented, by field name. Other fields are not decoded.
        statistics: Statistics of the values of each field, after decoding; empty if they were not computed.
        attributes: Facts that were recorded when the dataset was packed, such as the number of classes.
        shards: The shards, in the order of the samples.
    """

    version: Literal[1, 2, 3] = 2
    kind: Kind
    samples: Positive
    block_bytes: Positive
    fields: dict[str, FieldSpec]
    tokens: TokenWindows | None = None
    windows: WindowList | None = None
    indexed: bool = False
    decoding: dict[str, Decoding] = Field(default_factory=dict)
    statistics: dict[str, FieldStatistics] = Field(default_factory=dict)
    attributes: dict[str, JsonValue] = Field(default_factory=dict)
    shards: tuple[ShardEntry, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if not self.fields or not self.shards:
            raise ValueError("a dataset has at least one field and one shard")
        if (self.kind is Kind.TOKENS) != (self.tokens is not None):
            raise ValueError(
                "window and stride must be stated for a dataset of kind 'tokens', and for no other kind"
            )
        if self.tokens is not None:
            spec = self.fields.get(TOKENS_FIELD)
            if len(self.fields) != 1 or spec is None or spec.shape != (self.tokens.window + 1,):
                raise ValueError(
                    f"a dataset of kind 'tokens' must have exactly one field, {TOKENS_FIELD!r}, of shape (window + 1,)"
                )
            if spec.kind != "array":
                raise ValueError(f"the field of tokens must be of kind 'array', not {spec.kind!r}")
        if (self.windows is not None) != self.is_split:
            raise ValueError("a list of windows is needed if windows are split at documents, and only then")
        lengths = {name + LENGTH_SUFFIX for name, spec in self.fields.items() if spec.kind == "ragged"}
        if lengths & set(self.fields):
            raise ValueError(
                f"fields {', '.join(sorted(lengths & set(self.fields)))} have the names of lengths of ragged fields, "
                "which are reserved: rename the fields"
            )
        if (self.version == 3) != bool(self.decoding):
            raise ValueError("the version must be 3 if fields are decoded, and only then")
        for name, how in self.decoding.items():
            if name not in self.fields or self.fields[name].kind != "array" or self.tokens is not None:
                raise ValueError(f"field {name!r} is decoded, but is not a field of kind 'array'")
            if how.mask is not None and how.mask not in self.fields:
                raise ValueError(f"field {name!r} has the mask {how.mask!r}, which is not a stored field")
        if not set(self.statistics) <= set(self.fields):
            raise ValueError("there are statistics of a field that the dataset does not have")
        total = sum(shard.samples for shard in self.shards)
        if total != self.samples:
            raise ValueError(
                f"the manifest states {self.samples} samples in all, but the shards add up to {total}"
            )
        if len({shard.key for shard in self.shards}) != len(self.shards):
            raise ValueError("a shard is listed twice")
        for shard in self.shards:
            self._check_shard(shard)
        return self

    def _check_shard(self, shard: ShardEntry) -> None:
        # A manifest from elsewhere must not cause reads outside its directory, unless it is an index.
        if not self.indexed and not shard.is_plain_name:
            raise ValueError(f"shard file {shard.file!r} is not a plain file name")
        if shard.fields.keys() != self.fields.keys():
            raise ValueError(
                f"shard {shard.file} has fields {', '.join(sorted(shard.fields))}; "
                f"the dataset has {', '.join(sorted(self.fields))}"
            )
        for name, stored in shard.fields.items():
            self._check_stored(name, stored, shard)

    def _check_stored(self, name: str, stored: StoredField, shard: ShardEntry) -> None:
        where = f"field {name!r} of shard {shard.file}"
        if stored.whole and (shard.samples != 1 or stored.first_row or self.tokens is not None):
            raise ValueError(f"{where} is a whole HDF5 dataset: the shard must have exactly one sample")
        if self.fields[name].kind == "array" and not self.is_split:
            expected = self.stored_bytes(name, samples=shard.samples)
            if stored.num_bytes != expected:
                raise ValueError(
                    f"{where} has {stored.num_bytes} bytes, {shard.samples} samples need {expected}"
                )
        if stored.offset is not None:
            skipped = 0 if stored.whole else stored.first_row * self._row_bytes(name, stored, shard)
            if stored.offset + skipped + stored.num_bytes > shard.file_bytes:
                raise ValueError(f"{where} ends after the end of the file")
        blocks = -(-stored.num_bytes // self.block_bytes)
        if len(stored.hashes) not in (0, blocks):
            raise ValueError(f"{where} has {len(stored.hashes)} hashes, not {blocks}, one for each block")

    def _row_bytes(self, name: str, stored: StoredField, shard: ShardEntry) -> int:
        if self.tokens is not None:
            return np.dtype(self.fields[name].dtype).itemsize
        return stored.num_bytes // shard.samples

    @property
    def is_split(self) -> bool:
        """True if the samples are token windows, none of which crosses the start of a document."""
        return self.tokens is not None and self.tokens.boundaries == "split"

    @property
    def batch_fields(self) -> dict[str, FieldSpec]:
        """The fields of a batch, after decoding.

        After each ragged field (samples of different lengths) follows the field of its lengths: `<name>.length`, int64.
        """
        return _with_lengths(decoded_fields(self.fields, self.decoding))

    @property
    def stored_batch_fields(self) -> dict[str, FieldSpec]:
        """The stored fields that are read from the files to make a batch, before decoding.

        After each ragged field (samples of different lengths) follows the field of its lengths: `<name>.length`, int64.
        """
        return _with_lengths(self.fields)

    def stored_shape(self, name: str, *, samples: int) -> tuple[int, ...]:
        """Returns the shape that a field of kind `array` has in a packed shard.

        For token windows the boundaries of documents are ignored. In an existing file that was indexed in place, the
        HDF5 dataset may have more rows.

        Args:
            name: Name of the field.
            samples: Number of samples in the shard.
        """
        if self.tokens is not None:
            return (self.tokens.tokens_for(samples),)
        return (samples, *self.fields[name].shape)

    def stored_bytes(self, name: str, *, samples: int) -> int:
        """Returns the size in bytes that a field of kind `array` has in a packed shard, of shape `stored_shape`.

        Args:
            name: Name of the field.
            samples: Number of samples in the shard.
        """
        shape = self.stored_shape(name, samples=samples)
        return int(np.prod(shape, dtype=np.int64)) * np.dtype(self.fields[name].dtype).itemsize

    def entry_shape(self, name: str, entry: ShardEntry) -> tuple[int, ...]:
        """Returns the shape of the data that a field of kind `array` has in a given shard.

        If a whole HDF5 dataset is one sample, the shape has no sample dimension. If token windows may not cross the
        start of a document, the shape is (number of stored tokens,).

        Args:
            name: Name of the field.
            entry: The shard.
        """
        stored, spec = entry.fields[name], self.fields[name]
        if stored.whole:
            return spec.shape
        if self.is_split:
            return (stored.num_bytes // np.dtype(spec.dtype).itemsize,)
        return self.stored_shape(name, samples=entry.samples)

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the dataset: the hash of the manifest, which contains all data hashes.

        Statistics are not part of the hash.
        """
        exclude: dict[str, Any] = {"statistics": True}
        # The fingerprint of an older version, which checkpoints contain, is without the keys that it did not have.
        exclude |= {1: NOT_IN_VERSION_1, 2: NOT_IN_VERSION_2, 3: {}}[self.version]
        document = self.model_dump(mode="json", exclude=exclude)
        document["attributes"].pop(
            TYPES_CHECKED, None
        )  # an older index of the same files is the same dataset
        return _checksum(document)

    @property
    def has_checked_types(self) -> bool:
        """True if it is known that the bytes of contiguous fields are values of their numpy dtype.

        False for an index that was made by an early version of hpctrain, which did not check the HDF5 types.
        """
        return not self.indexed or bool(self.attributes.get(TYPES_CHECKED))

    @property
    def file_bytes(self) -> int:
        """Total size of all shard files in bytes, each file counted once."""
        return sum({shard.file: shard.file_bytes for shard in self.shards}.values())


def _with_lengths(fields: dict[str, FieldSpec]) -> dict[str, FieldSpec]:
    found: dict[str, FieldSpec] = {}
    for name, spec in fields.items():
        found[name] = spec
        if spec.kind == "ragged":
            found[name + LENGTH_SUFFIX] = FieldSpec(dtype="int64", shape=())
    return found


def _checksum(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hash_of(text.encode())


def write_manifest(manifest: Manifest, *, directory: Path) -> None:
    """Writes `manifest.json` atomically and durably: to a temporary file, fsync, rename, fsync of the directory."""
    document = manifest.model_dump(mode="json", exclude=None if manifest.version == 3 else NOT_IN_VERSION_2)
    document["checksum"] = _checksum(document)
    replace_file(
        directory / MANIFEST_NAME,
        (json.dumps(document, indent=1) + "\n").encode(),
        partial=directory / f".{MANIFEST_NAME}{PARTIAL_SUFFIX}",
        durable=True,
    )
    sync_directory(directory)


def read_manifest(directory: Path | str) -> Manifest:
    """Reads and checks the manifest of a dataset. Not collective.

    Args:
        directory: Directory of the dataset.

    Returns:
        The manifest.

    Raises:
        DataError: If there is no such directory or no dataset in it, or if packing has not finished. Also if the
            manifest cannot be read, has a newer version or a wrong checksum, or is inconsistent.
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
            f"the manifest {path} is not JSON ({error}): it is damaged; restore it or pack again"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("version"), int):
        raise DataError(f"{path} is not an hpctrain manifest: it has no version")
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
        return f"no dataset at {directory}: it is not a directory (a dataset is a directory with {MANIFEST_NAME})"
    below = sorted(child.name for child in directory.iterdir() if (child / MANIFEST_NAME).exists())
    if below:
        return f"no {MANIFEST_NAME} in {directory}, but datasets below it: name one of {', '.join(below)}"
    if any(SHARD_PREFIX in child.name for child in directory.iterdir()):
        return (
            f"the dataset at {directory} is unfinished: shards, but no {MANIFEST_NAME}; "
            "resume packing with --resume, or pack it again with --overwrite"
        )
    return f"no dataset at {directory}: it has no {MANIFEST_NAME} (hpctrain data pack SOURCE OUT makes one)"
