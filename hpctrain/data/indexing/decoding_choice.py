"""Combines the fields of all indexed files, chooses how they are decoded, and says what their stored numbers mean."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hpctrain.data.format.manifest import FieldSpec, Manifest
from hpctrain.data.format.manifest_entries import MASK_SUFFIX, Decoding, Number, Packing
from hpctrain.data.indexing.inspect_file import MAX_CLASSES, FoundDataset, FoundFile, open_to_index
from hpctrain.data.indexing.request import Decode, FieldRequest, SampleIs
from hpctrain.data.indexing.value_attributes import NOTHING, ValueMeaning, value_meaning
from hpctrain.errors import DataError, UsageError

# Merges the fields of all files, and reports files that do not agree. Pure.


@dataclass(frozen=True, kw_only=True)
class FieldSource:
    """An HDF5 file, or a group in it, that becomes one entry (shard) of an index's manifest.

    `fields` are the HDF5 datasets of the fields, by field name.
    """

    file: FoundFile
    fields: dict[str, FoundDataset]

    def describe(self, name: str) -> str:
        return f"{self.fields[name].dataset} of {self.file.path}"


def all_places(files: Sequence[FoundFile]) -> tuple[FieldSource, ...]:
    """Returns one `FieldSource` per file, or per group in a file, in the order of the files.

    A `FieldSource` lists the HDF5 datasets of the fields.
    """
    return tuple(FieldSource(file=file, fields=fields) for file in files for fields in file.places)


def num_samples(place: FieldSource, *, samples: SampleIs) -> int:
    """Returns the number of samples in one file, or in one group of a file (`place`).

    `samples` states what one sample is. Raises DataError if the fields have different numbers of samples.
    """
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
    """Returns dtype and shape of each field of a sample, by name. Raises DataError if the files do not agree.

    `places` are the files, or groups in files, with the datasets of the fields. The message of the error names two of
    them, and states how they differ.
    """
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
                f"field {name!r}, {places[0].describe(name)}, has variable lengths: its rows are samples, so use "
                "--samples rows"
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
                "a sample can have only one string, its label"
            )
    names = sorted({text for place in places for text in place.fields[name].classes})
    if len(names) > MAX_CLASSES:
        raise DataError(f"field {name!r} has {len(names)} different strings: that is text, not labels")
    return FieldSpec(dtype="int64", shape=(), kind="classes", classes=tuple(names))


# Chooses how the fields of an index are decoded, and says what their stored numbers mean.


class ValuesWarning(UserWarning):
    """Warning that the stored numbers of a field are not its values, or that some of them stand for missing values.

    Issued when a field is indexed and the user has not stated whether to decode the field.
    """


@dataclass(frozen=True, kw_only=True)
class DecodingChoice:
    """How the stored values of the fields of an index become values: scale, offset, missing values.

    Attributes:
        decoding: How the values of each decoded field are represented, by field name.
        requests: What was requested for each field that is read from the files, including masks.
        notes: Texts for the user, one line each.
        warnings: The texts in `notes` about fields whose stored numbers are not the values.
    """

    decoding: dict[str, Decoding] = field(default_factory=dict)
    requests: tuple[FieldRequest, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def meaning_of(place: FieldSource, name: str) -> ValueMeaning:
    """Returns what the file `place` states about the values of the field `name`, such as scale and missing values.

    Returns `NOTHING` if the file states nothing.
    """
    values = place.fields[name].values
    return ValueMeaning(**values) if values else NOTHING


def choose_decoding(places: Sequence[FieldSource], *, requests: Sequence[FieldRequest]) -> DecodingChoice:
    """Returns how each field is decoded, according to the requests and to what all files state about the field.

    Raises DataError if the values in a file cannot be decoded, or if files differ in a way that decoding cannot
    remove. The message names the files. Raises UsageError if a field has the name of the mask of another field.
    """
    decoding: dict[str, Decoding] = {}
    masks: list[FieldRequest] = []
    notes: list[str] = []
    warnings: list[str] = []
    for request in requests:
        meanings = [meaning_of(place, request.name) for place in places]
        if request.decode is not Decode.CF:
            if request.decode is None and (note := _note(request, meanings, places)):
                notes.append(note)
                warnings += [note] if any(meaning.changes for meaning in meanings) else []
            continue
        how = _decoding(request, meanings, places)
        if how is None:
            continue
        decoding[request.name] = how
        name = request.name + MASK_SUFFIX
        if how.mask is not None:
            masks.append(replace(request, name=name, decode=Decode.RAW))
        if (how.mask is not None or how.missing == "mask") and any(other.name == name for other in requests):
            raise UsageError(
                f"field {name!r} has the name of the mask of field {request.name!r}: give it another name"
            )
    return DecodingChoice(
        decoding=decoding, requests=(*requests, *masks), notes=tuple(notes), warnings=tuple(warnings)
    )


def _note(request: FieldRequest, meanings: Sequence[ValueMeaning], places: Sequence[FieldSource]) -> str:
    """Returns a text for the user about a field that is not decoded, since the user did not state how to read it.

    Returns "" if the files state nothing about its numbers.
    """
    for meaning, place in zip(meanings, places, strict=True):
        if meaning.changes or meaning.is_time:
            what = (
                f"field {request.name!r} is read as stored; of {place.describe(request.name)} the file says: "
            )
            differ = (
                ", and other files say something else"
                if any(m.said != meaning.said for m in meanings)
                else ""
            )
            says = f"{'; '.join(meaning.said) or meaning.problem}{differ}"
            can_decode = meaning.changes and not meaning.problem
            advice = "--decode cf decodes it, --decode raw" if can_decode else "--decode raw"
            return f"{what}{says} ({advice} reads it so without this line)"
    return ""


def _decoding(
    request: FieldRequest, meanings: Sequence[ValueMeaning], places: Sequence[FieldSource]
) -> Decoding | None:
    name = request.name
    units = {meaning.units for meaning in meanings if meaning.units}
    if len(units) > 1:
        first, other = (
            next(i for i, m in enumerate(meanings) if m.units == unit) for unit in sorted(units)[:2]
        )
        raise DataError(
            f"field {name!r} has units {meanings[first].units!r} in {places[first].describe(name)}, but "
            f"{meanings[other].units!r} in {places[other].describe(name)}: index them separately, "
            "or convert one of them"
        )
    if len({meaning.mask is None for meaning in meanings}) > 1:
        with_mask, without = (
            next(
                place
                for meaning, place in zip(meanings, places, strict=True)
                if (meaning.mask is None) is is_none
            )
            for is_none in (False, True)
        )
        raise DataError(
            f"field {name!r} has a mask in {with_mask.describe(name)}, but none in {without.describe(name)}: index "
            "them separately"
        )
    for meaning, place in zip(meanings, places, strict=True):
        where = f"field {name!r}, {place.describe(name)}, cannot be decoded"
        if meaning.problem:
            raise DataError(f"{where}: {meaning.problem}; --decode raw reads it as stored")
        if meaning.changes and (place.fields[name].kind != "numbers" or request.padded):
            raise DataError(f"{where}: its samples have variable lengths; --decode raw reads it as stored")
    if not any(meaning.changes or meaning.as_packing != Packing(missing=()) for meaning in meanings):
        return None
    if places[0].fields[name].kind != "numbers" or request.padded:
        return None
    packings = [meaning.as_packing for meaning in meanings]
    mask = name + MASK_SUFFIX if meanings[0].mask is not None else None
    has_missing = mask is not None or any(packing.has_missing for packing in packings)
    # Integers stay integers if only records that were never written can be missing, and none was seen.
    stay = (
        request.missing == "auto"
        and mask is None
        and all(meaning.unseen_default or not meaning.as_packing.has_missing for meaning in meanings)
    )
    to_nan = has_missing and request.missing in ("auto", "nan") and not stay
    dtype = np.result_type(
        *(
            _decoded_dtype(np.dtype(place.fields[name].dtype), packing, to_nan=to_nan)
            for packing, place in zip(packings, places, strict=True)
        )
    )
    value: Number = 0
    if not isinstance(request.missing, str):
        value = request.missing
        fits = dtype.kind == "f" or (
            value == int(value) and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
        )
        if not fits:
            raise UsageError(f"field {name!r}: {value} for missing values cannot be stored as {dtype.name}")
    missing = request.missing if isinstance(request.missing, str) else "value"
    if missing == "auto":
        missing = "refused" if stay and dtype.kind in "iu" else "nan"
    return Decoding(dtype=dtype.name, missing=missing, value=value, mask=mask)


def _decoded_dtype(stored: np.dtype[np.generic], packing: Packing, *, to_nan: bool) -> np.dtype[np.generic]:
    if packing.float_dtype is not None:
        return np.dtype(packing.float_dtype)
    data = stored if packing.stored_as is None else np.dtype(packing.stored_as)
    if data.kind == "f" or not to_nan:
        return data
    return np.dtype("float32" if data.itemsize <= 2 else "float64")


def packing_of(place: FieldSource, name: str) -> Packing:
    """Returns how the stored values of the field `name` in the file `place` are decoded: scale, offset, and so on."""
    return meaning_of(place, name).as_packing


def decoding_in_words(manifest: Manifest, name: str) -> str:
    """Returns a text that says how a field is decoded in the first file. Returns "" if the field is not decoded."""
    how, spec = manifest.decoding.get(name), manifest.fields[name]
    if how is None:
        return ""
    packings = [entry.fields[name].packing or Packing() for entry in manifest.shards]
    packing, parts = packings[0], []
    if packing.stored_as is not None:
        parts.append(f"read as {packing.stored_as}")
    if packing.float_dtype is not None:
        scale = 1 if packing.scale is None else packing.scale
        parts.append(f"times {scale} plus {0 if packing.offset is None else packing.offset}")
    if packing.missing:
        parts.append(f"missing where {', '.join(map(str, packing.missing))}")
    if packing.least is not None or packing.most is not None:
        of = "decoded " if packing.of_decoded else ""
        limits = [f"from {packing.least}"] * (packing.least is not None)
        limits += [f"to {packing.most}"] * (packing.most is not None)
        parts.append(f"valid {of}values {' '.join(limits)}")
    if how.mask is not None:
        parts.append("missing by a mask")
    if packing.has_missing or how.mask is not None:
        to = {"nan": "NaN", "value": str(how.value), "mask": f"0, and True in {name}{MASK_SUFFIX}"}
        to["refused"] = "an error"
        parts.append(f"missing values become {to[how.missing]}")
    if any(other != packing for other in packings):
        parts.append("other files differ")
    return f"decoded from {spec.dtype}: {'; '.join(parts) or 'converted'}"


def meanings_in_words(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Returns by field name what the first file of an index states about the field's numbers, in words.

    Returns {} if the dataset is not an index, or if the file cannot be read.
    """
    found: dict[str, str] = {}
    if not manifest.indexed:
        return found
    entry = manifest.shards[0]
    with contextlib.suppress(DataError), open_to_index(str(directory / entry.file)) as file:
        for name, stored in entry.fields.items():
            spec = manifest.fields[name]
            if spec.kind != "classes":
                meaning = value_meaning(file, path=stored.dataset, member=stored.member, dtype=spec.dtype)
                found[name] = "; ".join(meaning.said) or meaning.problem
    return found
