"""The parts of a manifest: fields of a sample, their statistics, and where a file holds them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# What a field may be: numpy's names. uint64 is left out, torch cannot compute with it.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("float16", "float32", "float64"),
)
LENGTH_SUFFIX = ".length"

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
FieldKind = Literal["array", "ragged", "classes"]
Boundaries = Literal["ignore", "split"]


class Model(BaseModel):
    """What all of them share: values that do not change, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FieldSpec(Model):
    """One field of a sample: numpy dtype name and shape, without the sample dimension.

    kind: `array`, every sample has `shape`, which is () for a number a sample. `ragged`: the first dimension
    differs from sample to sample, `shape` has its maximum; read padded with zeros, with a second tensor
    `<name>.length`, int64, that says how much of the first dimension is the sample's own. `classes`: strings
    in the file, read as int64 numbers, the place of the string in `classes`.
    classes: names of the class numbers; also allowed for integers of kind `array`.
    """

    dtype: str
    shape: tuple[Positive, ...]
    kind: FieldKind = "array"
    classes: tuple[str, ...] = ()

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"dtype {value!r} is not one of {', '.join(DTYPES)}")
        return value

    @model_validator(mode="after")
    def _kind_fits(self) -> FieldSpec:
        if self.kind == "classes" and (self.dtype != "int64" or self.shape or not self.classes):
            raise ValueError("a field of kind 'classes' is one int64 a sample, with at least one name")
        if self.kind == "ragged" and not self.shape:
            raise ValueError("a field of kind 'ragged' has at least one dimension")
        if self.classes and (np.dtype(self.dtype).kind not in "iu" or self.kind == "ragged"):
            raise ValueError("names of classes belong to integers")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("a class is named twice")
        return self

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the bytes that are hashed and written: little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample as read (ragged: padded)."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class FieldStatistics(Model):
    """Over all elements of a field; `count` of them. std is that of the population."""

    mean: float
    std: float
    min: float
    max: float
    count: NonNegative


class StoredField(Model):
    """One field in one shard: the HDF5 dataset, its place in the file, and the hash of each block.

    dataset: path within the file. offset: first byte of the dataset in the file if it is contiguous; None if
    not (chunked, compressed, compact, variable length, a member of a compound).
    whole: the whole dataset is one sample. Else its rows are samples (or tokens), from `first_row` on: row r
    of a contiguous dataset begins at offset + r * bytes of a row.
    member: which member of a compound dtype. big_endian: the bytes are the other way round in the file.
    num_bytes: logical bytes of this shard's rows, uncompressed; for variable lengths, of their elements.
    hashes: xxh3_64 of consecutive blocks of `Manifest.block_bytes` of those rows' little-endian row-major
    bytes, counted from `first_row`; the last block may be shorter. Empty: not hashed.
    """

    dataset: str
    offset: NonNegative | None
    num_bytes: NonNegative
    hashes: tuple[Hash, ...] = ()
    whole: bool = False
    first_row: NonNegative = 0
    member: str | None = None
    big_endian: bool = False


class ShardEntry(Model):
    """Samples of one HDF5 file; a file that holds a group a sample has several entries.

    file: a name in the dataset's directory; of indexed files a path, absolute or relative to it.
    structure_hash: over the bytes of the file that are in none of its fields; None if not computed.
    modified_ns: time of the file's last change, for files that are indexed; None if it does not matter.
    """

    file: str
    samples: Positive
    file_bytes: Positive
    structure_hash: Hash | None = None
    modified_ns: int | None = None
    fields: dict[str, StoredField]

    @field_validator("file")
    @classmethod
    def _a_path(cls, value: str) -> str:
        if not value or value.endswith(("/", "/..", "/.")) or value in (".", "..") or "\0" in value:
            raise ValueError(f"shard file {value!r} is no file name")
        return value

    @property
    def is_plain_name(self) -> bool:
        """Whether the file lies in the dataset's own directory."""
        return "/" not in self.file

    @property
    def key(self) -> tuple[str, str, int]:
        """What no two entries of a dataset share: file, dataset of the first field, first row."""
        first = next(iter(self.fields.values()), None)
        return (self.file, first.dataset, first.first_row) if first else (self.file, "", 0)


class TokenWindows(Model):
    """How samples are cut from the stream.

    boundaries `ignore`: sample i of a shard holds tokens [i * stride, i * stride + window + 1).
    `split`: no window crosses the start of a document; where each begins is listed (`Manifest.windows`).
    documents: HDF5 dataset of each shard, int64, ascending: the tokens (counted from the first of the shard)
    at which documents begin. None: not known.
    """

    window: Positive
    stride: Positive
    boundaries: Boundaries = "ignore"
    documents: str | None = None

    def tokens_for(self, samples: int) -> int:
        """Tokens that `samples` consecutive windows span (boundaries ignored)."""
        return (samples - 1) * self.stride + self.window + 1

    def windows_in(self, tokens: int) -> int:
        """Windows that fit in `tokens` consecutive tokens (boundaries ignored)."""
        return 0 if tokens <= self.window else (tokens - self.window - 1) // self.stride + 1


class WindowList(Model):
    """Where each window begins, for windows that are listed: `file`, an .npy beside the manifest.

    It holds int64 of shape (samples of the dataset,): the first token of each window, counted from the first
    token of its shard. hash: xxh3_64 of the file's bytes.
    """

    file: str = Field(pattern=r"^[^/]+\.npy$")
    file_bytes: Positive
    hash: Hash


# What a manifest of version 1 did not have: its fingerprint is made without, checkpoints hold it.
NOT_IN_VERSION_1: dict[str, Any] = {
    "windows": True,
    "indexed": True,
    "tokens": {"boundaries", "documents"},
    "fields": {"__all__": {"kind", "classes"}},
    "shards": {
        "__all__": {
            "modified_ns": True,
            "fields": {"__all__": {"whole", "first_row", "member", "big_endian"}},
        }
    },
}
