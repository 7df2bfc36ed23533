"""Interface of a source whose samples can be read by position, with implementations for arrays and for selections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import JsonValue, ValidationError

from hpctrain.data.format.manifest import DTYPES, FieldSpec
from hpctrain.data.order.epoch_order import EpochOrder
from hpctrain.errors import DataError, UsageError

_FIELD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class SampleRows(Protocol):
    """Interface of data to be packed with a known number of samples, which can be read by position in any order."""

    @property
    def num_samples(self) -> int: ...

    @property
    def fields(self) -> Mapping[str, FieldSpec]: ...

    @property
    def identity(self) -> JsonValue:
        """JSON value that changes if the content of the source changes.

        The value is computed from names, sizes and modification times of files.
        """

    def read(self, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Returns for each field an array of shape (n, *sample_shape). Raises DataError if reading fails.

        `positions` are the positions of the samples in the source: int64, shape (n,).
        """


@dataclass(frozen=True, kw_only=True)
class ArrayRows:
    """Samples in arrays or memory maps, one per field, each of shape (num_samples, *sample_shape).

    `classes` are the names of the classes, for fields that contain class indices. Raises DataError if there are no
    arrays, if they are empty or differ in length, or if an array is not a valid field.
    """

    arrays: Mapping[str, NDArray[Any]]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    identity: JsonValue = None

    def __post_init__(self) -> None:
        lengths = {name: len(array) for name, array in self.arrays.items() if self.fields and array.ndim}
        if not lengths or len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} has {count}" for name, count in lengths.items()) or "there is none"
            raise DataError(f"the fields of a dataset must have the same number of samples: {counts}")
        if self.num_samples == 0:
            raise DataError("the fields hold no samples: there is nothing to pack")

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def fields(self) -> dict[str, FieldSpec]:
        return {
            name: array_spec(name, array, classes=self.classes.get(name, ()))
            for name, array in self.arrays.items()
        }

    def read(self, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        chosen = as_slice(positions)
        return {name: np.asarray(array[chosen]) for name, array in self.arrays.items()}


@dataclass(frozen=True, kw_only=True)
class ChosenRows:
    """Selected samples of the source `rows`, or all samples of that source in another order.

    `positions` contains the position in `rows` of each sample: int64, shape (num_samples,). `choice` describes the
    selection, and becomes part of `identity`.
    """

    rows: SampleRows
    positions: NDArray[np.int64]
    choice: JsonValue

    @property
    def num_samples(self) -> int:
        return len(self.positions)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return self.rows.fields

    @property
    def identity(self) -> JsonValue:
        return {"of": self.rows.identity, "choice": self.choice}

    def read(self, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        return self.rows.read(self.positions[positions])


def split_rows(
    rows: SampleRows, *, held_out: float, seed: int, shuffle: bool = False, keep_order: bool = True
) -> dict[str, SampleRows]:
    """Divides the samples of `rows` into the parts `train` and `test`. If `held_out` is 0, there is one part, `all`.

    `held_out` is the fraction of the samples that go into `test`. `seed` determines which samples these are. With
    `shuffle` the samples of all parts are in random order. Without `shuffle` they keep the order of `rows`; with
    `keep_order=False`, `train` and `test` are in random order nevertheless. Raises UsageError if a part would be
    empty.
    """
    number = rows.num_samples
    if held_out == 0 and not shuffle:
        return {"all": rows}
    order = EpochOrder(num_samples=number, seed=seed).at(0, number)
    if held_out == 0:
        return {"all": ChosenRows(rows=rows, positions=order, choice=["shuffled", seed])}
    num_test = round(number * held_out)
    if not 0 < num_test < number:
        raise UsageError(f"--held-out {held_out} of {number} samples leaves one part empty")
    chosen = {"train": order[num_test:], "test": order[:num_test]}
    if keep_order and not shuffle:
        chosen = {part: np.sort(positions) for part, positions in chosen.items()}
    return {
        part: ChosenRows(rows=rows, positions=positions, choice=[part, held_out, seed, shuffle])
        for part, positions in chosen.items()
    }


def array_spec(name: str, array: NDArray[Any], *, classes: tuple[str, ...] = ()) -> FieldSpec:
    """Returns dtype and shape (FieldSpec) of a field whose samples are the rows of `array`.

    `array` has the shape (num_samples, *sample_shape). `classes` are the names of the classes, if the values are class
    indices. Raises DataError if the array cannot be a field.
    """
    if array.ndim == 0:
        raise DataError(f"field {name!r} is a scalar: an array with one entry per sample is needed")
    return field_spec(name, dtype=array.dtype, shape=array.shape[1:], classes=classes)


def field_spec(
    name: str, *, dtype: np.dtype[Any], shape: tuple[int, ...], classes: tuple[str, ...] = ()
) -> FieldSpec:
    """Returns the description (FieldSpec) of a field with the given dtype, and the given shape in one sample.

    Raises DataError if the name, dtype or shape is not valid.
    """
    if not _FIELD_NAME.fullmatch(name):
        raise DataError(
            f"field name {name!r}: must consist of letters, digits, '_', '.' and '-', and not begin with '.' or '-'"
        )
    if dtype.name not in DTYPES:
        raise DataError(f"field {name!r} has dtype {dtype}; possible are {', '.join(DTYPES)}")
    try:
        return FieldSpec(dtype=dtype.name, shape=shape, classes=classes)
    except ValidationError as error:
        if 0 in shape:
            raise DataError(f"field {name!r} has samples of shape {shape}: they have no elements") from None
        raise DataError(f"field {name!r}: {error.errors()[0]['msg']}") from None


def as_slice(positions: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Returns the indices `positions` as a slice if they are consecutive, else unchanged.

    Reading with a slice is faster than with an array of indices.
    """
    if len(positions) and np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))):
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return positions


# Finds the files of a source, and detects whether they have changed.


def source_identity(files: Iterable[Path]) -> JsonValue:
    """Returns a hash of the names, sizes and modification times of files.

    Raises DataError if a file cannot be accessed.
    """
    digest = xxhash.xxh3_64()
    try:
        for path in files:
            status = path.stat()
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    except OSError as error:
        raise DataError(f"a file of the source cannot be read: {error}") from error
    return digest.hexdigest()


def files_below(root: Path, *, suffixes: frozenset[str]) -> list[Path]:
    """Returns the files below `root` that have one of the suffixes, sorted. Hidden files are left out.

    Upper and lower case in the suffix of a file does not matter; `suffixes` are in lower case. Raises DataError if
    there is no such file.
    """
    if not root.is_dir():
        raise DataError(f"the source {root} {'is not a directory' if root.exists() else 'does not exist'}")
    found = [
        path
        for path in root.rglob("*")
        if path.suffix.lower() in suffixes
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not found:
        raise DataError(f"the source {root} holds no files named {', '.join(sorted(suffixes))}")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
