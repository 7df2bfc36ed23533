"""Merges the fields of all files, and reports files that do not agree. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.data.format.manifest import FieldSpec
from hpctrain.data.indexing.inspect_file import MAX_CLASSES, FoundDataset, FoundFile
from hpctrain.data.indexing.request import FieldRequest, SampleIs
from hpctrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class FieldSource:
    """A file, or a group of a file, that becomes one entry of the manifest."""

    file: FoundFile
    fields: dict[str, FoundDataset]

    def describe(self, name: str) -> str:
        return f"{self.fields[name].dataset} of {self.file.path}"


def all_places(files: Sequence[FoundFile]) -> tuple[FieldSource, ...]:
    """Returns one source per file, or per group of a file, in order."""
    return tuple(FieldSource(file=file, fields=fields) for file in files for fields in file.places)


def num_samples(place: FieldSource, *, samples: SampleIs) -> int:
    """Returns the number of samples of one place. Raises DataError if its fields have different numbers."""
    if samples is not SampleIs.ROWS:
        return 1
    counts: dict[str, int] = {}
    for name, found in place.fields.items():
        if not found.shape:
            raise DataError(
                f"field {name!r}, {place.describe(name)}, is one number, not one row per sample: "
                "--samples file makes each file one sample"
            )
        counts[name] = found.shape[0]
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise DataError(f"the fields of {place.file.path} do not have the same number of samples: {said}")
    return next(iter(counts.values()))


def combine(
    places: Sequence[FieldSource], *, requests: Sequence[FieldRequest], samples: SampleIs
) -> dict[str, FieldSpec]:
    """Returns the fields of one sample. Raises DataError that names two places that differ, and how."""
    return {request.name: _combine(places, request=request, samples=samples) for request in requests}


def _combine(places: Sequence[FieldSource], *, request: FieldRequest, samples: SampleIs) -> FieldSpec:
    name = request.name
    first = places[0].fields[name]
    whole = samples is not SampleIs.ROWS
    if request.padded and (not whole or first.kind != "numbers" or not first.shape):
        raise DataError(
            f"--pad {name}: only datasets that are one sample each, with a first dimension, can be padded "
            "(datasets of variable length are padded anyway)"
        )
    shapes = set()
    for place in places:
        found = place.fields[name]
        if (found.dtype, found.kind) != (first.dtype, first.kind):
            raise DataError(
                f"field {name!r} is {_what(first)} in {places[0].describe(name)}, "
                f"but {_what(found)} in {place.describe(name)}: index them separately, or convert one of them"
            )
        shape, other = _sample_shape(found, whole=whole), _sample_shape(first, whole=whole)
        if shape != other and not (request.padded and len(shape) == len(other) and shape[1:] == other[1:]):
            raise DataError(
                f"samples of field {name!r} have shape {other} in {places[0].describe(name)}, "
                f"but {shape} in {place.describe(name)}" + _advice(name, shape, other, whole=whole)
            )
        shapes.add(shape)
    if first.kind == "strings":
        return _class_field(places, name=name, whole=whole)
    if first.kind == "lengths":
        if whole:
            raise DataError(
                f"field {name!r}, {places[0].describe(name)}, has variable lengths: its rows are samples "
                "(--samples rows)"
            )
        longest = max(place.fields[name].longest for place in places)
        return FieldSpec(dtype=first.dtype, shape=(longest,), kind="ragged")
    if request.padded:
        longest = max(shape[0] for shape in shapes)
        return FieldSpec(
            dtype=first.dtype, shape=(longest, *_sample_shape(first, whole=whole)[1:]), kind="ragged"
        )
    return FieldSpec(dtype=first.dtype, shape=_sample_shape(first, whole=whole))


def _sample_shape(found: FoundDataset, *, whole: bool) -> tuple[int, ...]:
    return found.shape if whole else found.shape[1:]


def _advice(name: str, shape: tuple[int, ...], other: tuple[int, ...], *, whole: bool) -> str:
    if whole and shape and len(shape) == len(other) and shape[1:] == other[1:]:
        return f": --pad {name} pads the first dimension with zeros to the longest"
    return ": all samples of a dataset must have the same shape"


def _what(found: FoundDataset) -> str:
    return {"numbers": found.dtype, "strings": "strings", "lengths": f"{found.dtype} of variable length"}[
        found.kind
    ]


def _class_field(places: Sequence[FieldSource], *, name: str, whole: bool) -> FieldSpec:
    if whole and any(place.fields[name].shape for place in places):
        place = next(place for place in places if place.fields[name].shape)
        if int(np.prod(place.fields[name].shape)) != 1:
            raise DataError(
                f"field {name!r}, {place.describe(name)}, has {place.fields[name].shape} strings per sample; "
                "only one is possible, as a label"
            )
    names = sorted({text for place in places for text in place.fields[name].classes})
    if len(names) > MAX_CLASSES:
        raise DataError(f"field {name!r} has {len(names)} different strings: that is text, not labels")
    return FieldSpec(dtype="int64", shape=(), kind="classes", classes=tuple(names))
