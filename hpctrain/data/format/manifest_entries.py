"""The parts of a manifest: fields of a sample, their statistics, their location in a file, and their decoding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hpctrain.errors import DataError

# numpy names of the dtypes of fields. uint64 is left out: torch cannot compute with it.
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
    """Base class of the parts of a manifest. Parts are immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FieldSpec(Model):
    """One field of a sample: dtype and shape, without the sample dimension.

    Attributes:
        dtype: Name of the numpy dtype that the field has after reading.
        shape: Shape of the field in one sample; () for one number per sample. For kind `ragged` the first dimension
            is that of the longest sample.
        kind: `array`: every sample has this shape. `ragged`: the first dimension differs between samples. Samples are
            then padded with zeros when they are read, and the field `<name>.length`, int64, contains their lengths.
            `classes`: each sample is a string in the file, and is read as its index in `classes`, int64.
        classes: Names of the classes, in the order of their indices. Possible for kind `classes`, and for integers of
            kind `array`.
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
            raise ValueError(
                "a field of kind 'classes' must be one int64 per sample, with at least one class name"
            )
        if self.kind == "ragged" and not self.shape:
            raise ValueError("a field of kind 'ragged' must have at least one dimension")
        if self.classes and (np.dtype(self.dtype).kind not in "iu" or self.kind == "ragged"):
            raise ValueError("only integers that are not ragged can have names of classes")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("a class is named twice")
        return self

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The field's dtype in little-endian byte order, in which values are hashed and written."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def sample_bytes(self) -> int:
        """Size of the field in one sample in bytes, after reading and padding."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class FieldStatistics(Model):
    """Statistics of the `count` finite elements of a field. `std` is the population standard deviation."""

    mean: float
    std: float
    min: float
    max: float
    count: NonNegative


Number = int | float  # an integer stays one in JSON


class Packing(Model):
    """How the stored values of one HDF5 dataset are decoded, as its attributes state by conventions such as CF.

    A decoded value is stored value * scale + offset.

    Attributes:
        stored_as: Integer dtype as which the stored bits are read (attribute `_Unsigned`); None: the dtype of the
            HDF5 dataset.
        float_dtype: dtype in which stored value * scale + offset is computed; None if there is neither scale nor
            offset.
        scale: Factor by which stored values are multiplied; None: no factor.
        offset: Number that is added after the multiplication; None: nothing is added.
        missing: Stored values that stand for a missing value.
        nan_is_missing: True if a stored NaN stands for a missing value, too.
        least: Values below this number are missing; None: no lower limit.
        most: Values above this number are missing; None: no upper limit.
        of_decoded: True if `least` and `most` are limits of the decoded values, False if they are limits of the stored
            values.
    """

    stored_as: str | None = None
    float_dtype: Literal["float32", "float64"] | None = None
    scale: Number | None = None
    offset: Number | None = None
    missing: tuple[Number, ...] = ()
    nan_is_missing: bool = False
    least: Number | None = None
    most: Number | None = None
    of_decoded: bool = False

    @property
    def has_missing(self) -> bool:
        return bool(self.missing or self.nan_is_missing or self.least is not None or self.most is not None)


class Decoding(Model):
    """How the decoded values of a field are represented in batches. The same for all files.

    Attributes:
        dtype: Name of the numpy dtype of the decoded values.
        missing: How a missing value is represented. "nan": as NaN. "value": as the number `value`. "mask": as 0, and
            as True in the additional field `NAME.mask`, bool, of the same shape. "refused": reading a missing value is
            an error.
        value: The number that replaces missing values with `missing="value"`.
        mask: Name of a stored field that is nonzero where a value of this field is missing; None: there is no such
            field. Batches do not contain the mask field.
    """

    dtype: str
    missing: Literal["nan", "value", "mask", "refused"] = "nan"
    value: Number = 0
    mask: str | None = None


class StoredField(Model):
    """One field in one shard: the HDF5 dataset, its location in the file, and the hashes of its blocks.

    Attributes:
        dataset: Path of the HDF5 dataset in the file.
        offset: File offset of the HDF5 dataset in bytes, if it is contiguous. None if it is chunked, compressed,
            compact, of variable length, or if the field is a member of a compound.
        num_bytes: Uncompressed size of this shard's rows in bytes. For rows of variable length, the size of their
            elements.
        hashes: xxh3_64 hashes of the bytes of this shard's rows, little-endian and row-major: one hash per block of
            `Manifest.block_bytes` bytes. The last block may be shorter. Empty if the rows were not hashed.
        whole: True if the whole HDF5 dataset is one sample; False if each row is a sample (or a token).
        first_row: Index of the first row that belongs to this shard. Row r of a contiguous HDF5 dataset begins at
            offset + r * (bytes per row).
        member: Name of the member, if the field is a member of a compound dtype; else None.
        big_endian: True if the values in the file are big-endian, False if they are little-endian.
        packing: How the stored values are decoded, for fields in `Manifest.decoding`; else None.
    """

    dataset: str
    offset: NonNegative | None
    num_bytes: NonNegative
    hashes: tuple[Hash, ...] = ()
    whole: bool = False
    first_row: NonNegative = 0
    member: str | None = None
    big_endian: bool = False
    packing: Packing | None = None


class ShardEntry(Model):
    """One shard: consecutive samples in one HDF5 file. A file with one group per sample has one entry per group.

    Attributes:
        file: Name of the file in the dataset's directory. For indexed files a path, absolute or relative to the
            directory.
        samples: Number of samples in the shard.
        file_bytes: Size of the file in bytes.
        structure_hash: Hash of the bytes of the file that do not belong to a field, such as HDF5 headers; None if it
            was not computed.
        modified_ns: Modification time of an indexed file, in nanoseconds; None for packed shards.
        fields: Location and hashes of each field in the file, by field name.
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
            raise ValueError(f"the file of a shard, {value!r}, is not a file name")
        return value

    @property
    def is_plain_name(self) -> bool:
        """True if the file is in the dataset's directory."""
        return "/" not in self.file

    @property
    def key(self) -> tuple[str, str, int]:
        """Key of the shard in the manifest: file, path of the first field's HDF5 dataset, first row of the shard."""
        first = next(iter(self.fields.values()), None)
        return (self.file, first.dataset, first.first_row) if first else (self.file, "", 0)


class TokenWindows(Model):
    """How samples (windows of consecutive tokens) are cut from the token stream.

    Attributes:
        window: Number of tokens that are predicted in a sample. A sample has window + 1 tokens.
        stride: Number of tokens from the start of a window to the start of the next window.
        boundaries: `ignore`: sample i of a shard contains the tokens from i * stride to i * stride + window,
            inclusive. `split`: no window crosses the start of a document; `Manifest.windows` lists the starts of the
            windows.
        documents: Name of an HDF5 dataset in each shard. It contains the index in the shard of the first token of each
            document: int64, ascending. None: the starts of documents are unknown.
    """

    window: Positive
    stride: Positive
    boundaries: Boundaries = "ignore"
    documents: str | None = None

    def tokens_for(self, samples: int) -> int:
        """Returns the number of tokens from the first token of the first to the last token of the last window.

        `samples` is the number of consecutive windows. Boundaries of documents are ignored.
        """
        return (samples - 1) * self.stride + self.window + 1

    def windows_in(self, tokens: int) -> int:
        """Returns the number of windows that fit into `tokens` consecutive tokens, ignoring boundaries of documents."""
        return 0 if tokens <= self.window else (tokens - self.window - 1) // self.stride + 1


class WindowList(Model):
    """The file that lists the starts of all token windows: an .npy file in the directory of the manifest.

    For each window, the file contains the index of the first token within the window's shard: int64, shape (number
    of samples of the dataset,). `hash` is the xxh3_64 hash of the bytes of the file.
    """

    file: str = Field(pattern=r"^[^/]+\.npy$")
    file_bytes: Positive
    hash: Hash


# Keys of version 3, which only datasets with decoded fields have; the others are written as version 2.
NOT_IN_VERSION_2: dict[str, Any] = {
    "decoding": True,
    "shards": {"__all__": {"fields": {"__all__": {"packing"}}}},
}

# Keys that version 1 did not have. Its fingerprint, which checkpoints contain, is computed without them.
NOT_IN_VERSION_1: dict[str, Any] = {
    "windows": True,
    "indexed": True,
    "decoding": True,
    "tokens": {"boundaries", "documents"},
    "fields": {"__all__": {"kind", "classes"}},
    "shards": {
        "__all__": {
            "modified_ns": True,
            "fields": {"__all__": {"whole", "first_row", "member", "big_endian", "packing"}},
        }
    },
}


# How the stored values of a field become the values that they mean: scale, offset, missing values. Pure.
#
# Source of the rules: CF Conventions 1.11, sections 2.5.1 (missing data) and 8.1 (packed data), and the
# NetCDF User's Guide, appendix A (attribute conventions).


MASK_SUFFIX = ".mask"
_EXACT_IN_FLOAT64 = 1 << 53


def decoded_fields(fields: dict[str, FieldSpec], decoding: dict[str, Decoding]) -> dict[str, FieldSpec]:
    """Returns the fields of a decoded batch, by name, in the order of `fields`.

    `fields` are the fields as they are stored, and `decoding` states how some of them are decoded. Stored mask fields
    are left out.
    """
    masks = {one.mask for one in decoding.values()}
    found: dict[str, FieldSpec] = {}
    for name, spec in fields.items():
        if name in masks:
            continue
        how = decoding.get(name)
        found[name] = spec if how is None else FieldSpec(dtype=how.dtype, shape=spec.shape)
        if how is not None and how.missing == "mask":
            found[name + MASK_SUFFIX] = FieldSpec(dtype="bool", shape=spec.shape)
    return found


@np.errstate(over="ignore", invalid="ignore")  # of NaN, and of values that become infinite, missing ones too
def decode_values(
    stored: NDArray[Any],
    *,
    packing: Packing,
    decoding: Decoding,
    mask: NDArray[Any] | None = None,
    is_exact: bool = True,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Returns the decoded values, and an array that is True where a value is missing. Both have the shape of `stored`.

    `stored` are the values in the file, native-endian. `mask`, if given, has the same shape and is nonzero where a
    value is missing. Raises DataError for a missing value if `decoding.missing` is "refused". Raises DataError also
    for an integer that the decoded dtype cannot represent exactly; with `is_exact` False the integer is rounded.
    """
    data = stored if packing.stored_as is None else stored.view(packing.stored_as)
    missing = np.zeros(data.shape, dtype=np.bool_)
    for value in packing.missing:
        missing |= data == data.dtype.type(value)
    if packing.nan_is_missing:
        missing |= np.isnan(data)
    if mask is not None:
        missing |= mask != 0
    if not packing.of_decoded:
        missing |= _outside(data, packing)
    dtype = np.dtype(decoding.dtype)
    if packing.float_dtype is None:
        if is_exact:
            _check_exact(data, missing, dtype)
        values = data.astype(dtype)
    else:
        computed = np.dtype(packing.float_dtype)
        values = data.astype(computed)
        if packing.scale is not None:
            values *= computed.type(packing.scale)
        if packing.offset is not None:
            values += computed.type(packing.offset)
        if packing.of_decoded:
            missing |= _outside(values, packing)
        values = values.astype(dtype, copy=False)
    if missing.any():
        if decoding.missing == "refused":
            raise DataError(
                f"{data[missing].flat[0]} is what netCDF leaves in a record that was never written, and an integer "
                "field has no value for missing data: index the files again with --missing nan, mask or a number"
            )
        values[missing] = {"nan": np.nan, "value": decoding.value, "mask": 0}[decoding.missing]
    return values, missing


def _outside(data: NDArray[Any], packing: Packing) -> NDArray[np.bool_]:
    """Returns an array that is True where a value is below `packing.least` or above `packing.most`. False for NaN.

    For floating-point values the limits are rounded to the dtype of the values, as the values themselves were.
    """
    exact = (lambda limit: limit) if data.dtype.kind in "iub" else data.dtype.type
    outside = np.zeros(data.shape, dtype=np.bool_)
    if packing.least is not None:
        outside |= data < exact(packing.least)
    if packing.most is not None:
        outside |= data > exact(packing.most)
    return outside


def _check_exact(data: NDArray[Any], missing: NDArray[np.bool_], dtype: np.dtype[Any]) -> None:
    if data.dtype.itemsize < 8 or data.dtype.kind not in "iu" or dtype.kind != "f":
        return
    large = (
        (data > _EXACT_IN_FLOAT64) | (data < -_EXACT_IN_FLOAT64 if data.dtype.kind == "i" else False)
    ) & ~missing
    if large.any():
        raise DataError(
            f"the value {data[large].flat[0]} is too large to be exact in {dtype.name}, which the field has because "
            "NaN stands for its missing values: index the files again with --missing mask or a number"
        )


# Mean, standard deviation, minimum and maximum of a field, accumulated shard by shard in float64.
#
# Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
# variances", Stanford STAN-CS-79-773, 1979. Blocks are added in the order of the samples, shards in the
# order of the dataset: the result does not depend on the number of ranks that packed it.


# Small enough for the float64 copy of a block to stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Mean, sum of squared deviations, minimum and maximum of `count` finite elements.

    The sum of two objects describes the elements of both together. `squares` is the sum of (element - mean)^2. `low` is
    the smallest element and `high` the largest; both are valid only if count > 0.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def __add__(self, other: Moments) -> Moments:
        if not other.count or not self.count:
            return self if self.count else other
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * (other.count / count),
            squares=self.squares + other.squares + delta * delta * (self.count * (other.count / count)),
            low=min(self.low, other.low),
            high=max(self.high, other.high),
        )

    def as_json(self) -> dict[str, float | int]:
        """Returns the moments as JSON values, or {} if there are no elements.

        Without elements the minimum and the maximum are infinite, which JSON cannot represent.
        """
        return asdict(self) if self.count else {}

    def statistics(self) -> FieldStatistics | None:
        """Returns the statistics for the manifest, or None if no element is finite or if float64 overflowed."""
        if not self.count or not math.isfinite(self.squares) or not math.isfinite(self.mean):
            return None
        return FieldStatistics(
            mean=self.mean,
            std=math.sqrt(self.squares / self.count),
            min=self.low,
            max=self.high,
            count=self.count,
        )


def moments_of(array: NDArray[Any]) -> Moments:
    """Returns mean, variance and extremes of all finite elements of an array. Booleans count as 0 and 1."""
    flat = array.reshape(-1)
    if flat.dtype == np.uint8:
        return _of_bytes(flat)
    total = Moments()
    for start in range(0, len(flat), _BLOCK_ELEMENTS):
        total += _of_block(flat[start : start + _BLOCK_ELEMENTS])
    return total


def _of_block(block: NDArray[Any]) -> Moments:
    with np.errstate(invalid="ignore"):  # signaling NaN
        values = block.astype(np.float64)
    if block.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            values = values[finite]
    if not len(values):
        return Moments()
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.mean())
        low, high = float(values.min()), float(values.max())
        values -= mean
        squares = float(np.dot(values, values))
    return Moments(count=len(values), mean=mean, squares=squares, low=low, high=high)


def _of_bytes(flat: NDArray[np.uint8]) -> Moments:
    """Returns the exact `Moments` (mean, variance, extremes) of a uint8 array, from a histogram of its values."""
    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, len(flat), _BLOCK_ELEMENTS):
        counts += np.bincount(flat[start : start + _BLOCK_ELEMENTS], minlength=256)
    if not len(flat):
        return Moments()
    present = np.flatnonzero(counts)
    mean = float(np.dot(np.arange(256), counts)) / len(flat)
    squares = float(np.dot((np.arange(256) - mean) ** 2, counts))
    return Moments(
        count=len(flat), mean=mean, squares=squares, low=float(present[0]), high=float(present[-1])
    )


def statistics_of(parts: Iterable[Mapping[str, Moments]]) -> dict[str, FieldStatistics]:
    """Returns the statistics of each field of a dataset, by field name.

    `parts` contains one dict per part of the dataset, in order: the `Moments` of each field in that part, by field
    name. Fields that have no statistics (see `Moments.statistics`) are left out.
    """
    totals: dict[str, Moments] = {}
    for part in parts:
        for name, moments in part.items():
            totals[name] = totals.get(name, Moments()) + moments
    found = {name: moments.statistics() for name, moments in totals.items()}
    return {name: statistics for name, statistics in found.items() if statistics is not None}
