"""Finds attributes, datasets and groups that scale the values of a dataset by conventions other than CF.

The functions search the attributes of the dataset, and the datasets and groups near the dataset. Such scales are
reported, but not decoded, since the conventions combine scale and offset in different ways: NeXus
(`NAME_scaling_factor`,
`NAME_offset`: (stored + offset) * factor), openPMD (`unitSI`), HDF-EOS5 of OMI (`ScaleFactor`, `Offset`,
`MissingValue`, `ValidRange`), NWB (`conversion`, `offset`, `channel_conversion`), ODIM (`gain`, `offset`, `nodata`,
`undetect` of the group `what`), ocean colour (`slope`, `intercept`), FITS (`BSCALE`, `BZERO`, `BLANK`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import h5py

# Names of attributes in small letters, without '_' and the like. Attributes of CF, written as in CF, are not here.
_SCALES = {
    "scalefactor",
    "scalingfactor",
    "unitsfactor",
    "unitfactor",
    "unitsi",
    "conversion",
    "conversionfactor",
    "bscale",
}
# Words that also describe pixels and cameras. They count only for integers, or if there is an offset as well.
_VAGUE_SCALES = {"scale", "scaling", "slope", "gain", "multiplier"}
_OFFSETS = {"addoffset", "scaleoffset", "bzero"}
_VAGUE_OFFSETS = {"offset", "intercept"}
_MISSING = {
    "missingvalue",
    "missingvalues",
    "fillvalue",
    "nodata",
    "nodatavalue",
    "undetect",
    "codemissingvalue",
    "blank",
}
_RANGES = {"validrange", "validmin", "validmax", "validminimum", "validmaximum", "minvalid", "maxvalid"}
_ROLES = _SCALES | _VAGUE_SCALES | _OFFSETS | _VAGUE_OFFSETS | _MISSING | _RANGES
OF_CF = {"scale_factor", "add_offset", "_FillValue", "missing_value", "valid_range", "valid_min", "valid_max"}
# How the texts of pandas' attributes NAME_kind, NAME_dtype and value_type begin.
_PANDAS_TIMES = ("datetime64", "timedelta64")


def said_by_attributes(
    attributes: Mapping[str, Any], stored: np.dtype[Any], *, of_table: bool = False
) -> list[str]:
    """Returns "NAME = VALUE" for each attribute of a dataset which states that its numbers are not plain values.

    Such attributes state that numbers are scaled, or stand for missing values. `stored` is the dtype of the numbers.
    `of_table` is True if the attributes are those of a whole table; vague names, such as `scale` or `offset`, are then
    ignored. Also ignored are a scale of 1, an offset of 0, a missing value that is NaN or that the dtype cannot
    represent, texts that are not numbers, and numbers that attributes of CF state as well.
    """
    names = {name: re.sub(r"[^a-z0-9]", "", name.lower()) for name in attributes}
    roles = {name: role for name, role in names.items() if role in _ROLES and name not in OF_CF}
    if not roles:
        return []
    numbers = {name: found for name in roles if (found := _numbers(attributes, name)) is not None}
    known = _cf_numbers(attributes)
    has_offset = any(
        roles[name] in _OFFSETS | _VAGUE_OFFSETS and np.any(numbers[name] != 0) for name in numbers
    )
    has_scale = any(roles[name] in _SCALES | _VAGUE_SCALES for name in numbers)
    said: list[str] = []
    for name, values in numbers.items():
        role = roles[name]
        if role in _SCALES:
            counts = bool(np.any(values != 1))
        elif role in _VAGUE_SCALES:
            is_packed = stored.kind in "iu" and role != "gain"
            counts = not of_table and len(values) == 1 and values[0] != 1 and (is_packed or has_offset)
        elif role in _OFFSETS:
            counts = bool(np.any(values != 0))
        elif role in _VAGUE_OFFSETS:
            counts = not of_table and has_scale and len(values) == 1 and values[0] != 0
        elif role in _MISSING:
            counts = any(_can_hold(stored, value) for value in values)
        else:
            counts = True
        if counts and not _is_known(values, known):
            said.append(f"{name} = {_shown(values)}")
    return said


def said_by_neighbours(file: h5py.File, path: str) -> list[str]:
    """Returns what other datasets and groups state about the scale of the dataset at `path`, by NeXus, NWB and ODIM.

    The result is a list of texts, which is empty if nothing is stated.
    """
    import h5py

    group, _, name = path.rpartition("/")
    exists = file.id.links.exists
    said = _said_by_odim(file, group) if name == "data" else []
    if name == "data" and exists(f"{group}/channel_conversion".encode()):
        numbers = _of_dataset(file, f"{group}/channel_conversion")
        said += [f"{group}/channel_conversion (NWB)"] if numbers is not None and np.any(numbers != 1) else []
    # One call for most files, a cheaper one in the root: of 10,000 files each call counts.
    where = {"obj_name": group.encode()} if group else {}
    if not h5py.h5a.exists(file.id, b"NX_class", **where):
        return said
    neutral = {f"{path}_scaling_factor": 1, f"{path}_offset": 0}
    signal = text_of(_attributes(file, group or "/").get("signal"))
    if name in ("data", signal) or "signal" in _attributes(file, path):
        neutral |= {f"{group}/scaling_factor": 1, f"{group}/offset": 0}
    there = [place for place in neutral if place != path and exists(place.encode())]
    for place in there:
        numbers = _of_dataset(file, place)
        if numbers is not None and np.any(numbers != neutral[place]):
            said.append(f"{place} = {_shown(numbers)} (NeXus: (stored + offset) * scaling_factor)")
    return said


def _said_by_odim(file: h5py.File, group: str) -> list[str]:
    """Returns what attributes of ODIM state about the scale of datasets in `group`, one text each.

    ODIM (weather radar) stores these attributes in groups named `what`, in the group of the dataset and in the groups
    above. If several have an attribute of the same name, that of the group nearest to the dataset is valid.
    """
    found: dict[str, Any] = {}
    levels = group.split("/")
    for number in range(1, len(levels) + 1):
        place = "/".join([*levels[:number], "what"])
        if file.id.links.exists(place.encode()):
            of_level = _attributes(file, place)
            found |= {
                key: of_level[key] for key in ("gain", "offset", "nodata", "undetect") if key in of_level
            }
    if not {"gain", "offset"} <= set(found):
        return []
    numbers = {key: _numbers(found, key) for key in found}
    neutral = {"gain": 1, "offset": 0}
    return [
        f"{key} = {_shown(values)} (of {group}/what)"
        for key, values in numbers.items()
        if values is not None and np.any(values != neutral.get(key))
    ]


def pandas_kind(attributes: Mapping[str, Any], names: Iterable[str], member: str | None) -> str:
    """Returns what the attributes of pandas state about a column of integers.

    The result is "category", a dtype such as "datetime64[ns]", or "" if the attributes state neither. `names` are the
    names of the attributes, and `member` is the column of a table, or None.
    """
    if member is None:
        kind = text_of(attributes["value_type"]) if "value_type" in names else ""
        return kind if kind.startswith(_PANDAS_TIMES) else ""
    if f"{member}_meta" in names and text_of(attributes[f"{member}_meta"]) == "category":
        return "category"
    for key in (f"{member}_dtype", f"{member}_kind"):
        if key in names and text_of(attributes[key]).startswith(_PANDAS_TIMES):
            return text_of(attributes[key])
    return ""


def _attributes(file: h5py.File, path: str) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = file[path].attrs
    except (KeyError, OSError, RuntimeError):  # a link that leads nowhere, or to a file that is not there
        return {}
    return found


def _of_dataset(file: h5py.File, path: str) -> NDArray[Any] | None:
    import h5py

    try:
        dataset = file[path]
        if not isinstance(dataset, h5py.Dataset) or dataset.size is None or not 0 < dataset.size <= 1 << 16:
            return None
        values = np.asarray(dataset[()]).reshape(-1)
    except (KeyError, OSError, RuntimeError, TypeError, ValueError):
        return None
    return values if values.dtype.kind in "iuf" else None


def _numbers(attributes: Mapping[str, Any], name: str) -> NDArray[Any] | None:
    """Returns the numbers in an attribute, also from texts such as "0.01". Returns None if it contains no numbers."""
    try:
        values: NDArray[Any] = np.asarray(attributes[name]).reshape(-1)
        if values.dtype.kind in "SUO":
            values = np.array([float(text_of(one)) for one in values.tolist()])
    except (TypeError, ValueError, OSError, RuntimeError, KeyError):
        return None
    return values if values.dtype.kind in "iuf" and len(values) else None


def _cf_numbers(attributes: Mapping[str, Any]) -> list[float]:
    found = (_numbers(attributes, name) for name in OF_CF if name in attributes)
    return [float(value) for values in found if values is not None for value in values]


def _is_known(values: NDArray[Any], known: list[float]) -> bool:
    """Returns True if each of `values` is also in `known`, up to rounding to float32.

    `known` are the numbers in the CF attributes of the dataset.
    """
    return all(any(np.isclose(float(value), other, rtol=1e-6, atol=0) for other in known) for value in values)


def _can_hold(stored: np.dtype[Any], value: Any) -> bool:
    if value != value:
        return False
    if stored.kind not in "iu":
        return stored.kind == "f"
    limits = np.iinfo(stored)
    return (
        bool(value == int(value) and limits.min <= int(value) <= limits.max) if np.isfinite(value) else False
    )


def _shown(values: NDArray[Any]) -> str:
    shown = ", ".join(f"{one:g}" if values.dtype.kind == "f" else str(one) for one in values[:4])
    return shown + (", ..." if len(values) > 4 else "")


def text_of(value: Any) -> str:
    """Returns the value of an attribute as a text, or "" if `value` is None or empty."""
    if isinstance(value, np.ndarray):
        value = value.reshape(-1)[0] if value.size else ""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value.strip("\0 ") if isinstance(value, str) else ("" if value is None else str(value))
