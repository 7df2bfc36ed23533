"""Samples by position, as a source offers them to the packer: all at once, or read as they are needed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue, ValidationError

from hpctrain.data.format.manifest import DTYPES, FieldSpec
from hpctrain.data.order.epoch_order import EpochOrder
from hpctrain.errors import DataError, UsageError

_FIELD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Rows(Protocol):
    """A known number of samples, in an order, each read at any time by its position."""

    @property
    def num_samples(self) -> int: ...

    @property
    def fields(self) -> Mapping[str, FieldSpec]: ...

    @property
    def identity(self) -> JsonValue:
        """Tells contents apart without reading them: names, sizes and times of files."""

    def read(self, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Field -> array of shape (len(positions), *sample_shape). Raises DataError."""


@dataclass(frozen=True, kw_only=True)
class ArrayRows:
    """Arrays of equal first dimension: field name -> (num_samples, *sample_shape); memory maps too.

    Raises DataError for arrays that make no dataset.
    """

    arrays: Mapping[str, NDArray[Any]]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    identity: JsonValue = None

    def __post_init__(self) -> None:
        lengths = {name: len(array) for name, array in self.arrays.items() if self.fields and array.ndim}
        if not lengths or len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} has {count}" for name, count in lengths.items()) or "there is none"
            raise DataError(f"the fields of a dataset have the same number of samples: {counts}")
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
    """Some of another source's samples, or all in another order. positions: shape (num_samples,)."""

    rows: Rows
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
    rows: Rows, *, held_out: float, seed: int, shuffle: bool = False, keep_order: bool = True
) -> dict[str, Rows]:
    """`train` and `test`, or `all` if nothing is held out; `test` is a random choice, by `seed` alone.

    shuffle: samples come in a random order. Else, with keep_order, in the order they had; without it the
    parts of a split are in random order all the same.
    Raises UsageError if a part would be empty.
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
    """The field that an array of samples makes. Raises DataError for one that makes none."""
    if array.ndim == 0:
        raise DataError(f"field {name!r} is a scalar: an array with one entry a sample is needed")
    return field_spec(name, dtype=array.dtype, shape=array.shape[1:], classes=classes)


def field_spec(
    name: str, *, dtype: np.dtype[Any], shape: tuple[int, ...], classes: tuple[str, ...] = ()
) -> FieldSpec:
    """A field of samples of that dtype and shape. Raises DataError for a name, dtype or shape that is none."""
    if not _FIELD_NAME.fullmatch(name):
        raise DataError(
            f"field name {name!r}: letters, digits, '_', '.' and '-' are possible, not first '.' or '-'"
        )
    if dtype.name not in DTYPES:
        raise DataError(f"field {name!r} has dtype {dtype}; possible are {', '.join(DTYPES)}")
    try:
        return FieldSpec(dtype=dtype.name, shape=shape, classes=classes)
    except ValidationError as error:
        if 0 in shape:
            raise DataError(f"field {name!r} has samples of shape {shape}: they hold nothing") from None
        raise DataError(f"field {name!r}: {error.errors()[0]['msg']}") from None


def as_slice(positions: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """A slice where the positions follow each other: arrays and maps then need no copy, or a faster one."""
    if len(positions) and np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))):
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return positions
