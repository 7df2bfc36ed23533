"""Finds what a file states about the values of an HDF5 dataset: scale, offset, missing values, masks, units.

The sources are attributes of the dataset, and other groups and datasets of the file.

Conventions: CF and the NetCDF User's Guide (`scale_factor`, `add_offset`, `_FillValue`, `missing_value`, `valid_*`,
`_Unsigned`, `units`), the default fill values of the netCDF library, astropy's `NAME.mask`, anndata's nullable
groups and categories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest_entries import Packing
from hpctrain.data.indexing.other_conventions import (
    pandas_kind,
    said_by_attributes,
    said_by_neighbours,
    text_of,
)

if TYPE_CHECKING:
    import h5py

_FILLS = ("_FillValue", "missing_value")
_RANGES = ("valid_range", "valid_min", "valid_max")
# netcdf.h, NC_FILL_*: what the netCDF library fills variables with that have no _FillValue. Of single bytes it does not
# count as missing.
_DEFAULT_FILLS: dict[str, int | float] = {
    "int16": -32767, "uint16": 65535, "int32": -2147483647, "uint32": 4294967295, "int64": -9223372036854775806,
    "float32": 9.9692099683868690e36, "float64": 9.9692099683868690e36,
}  # fmt: skip
_SEEN_ROWS = 3
_ONLY_A_DIMENSION = "This is a netCDF dimension but not a netCDF variable"
_READ_ATTRIBUTES = (*_FILLS, *_RANGES, "scale_factor", "add_offset", "_Unsigned")


@dataclass(kw_only=True)
class ValueMeaning:
    """What a file states about the values of one HDF5 dataset. All attributes are JSON values.

    Attributes:
        packing: Arguments of a `Packing`, such as scale, offset and missing values.
        mask: Path and member of the dataset that is nonzero where a value is missing. The member is None if the mask
            is a whole dataset. None: there is no mask.
        said: What the attributes of the dataset, and other datasets of the file, state about the dataset, one text
            each.
        changes: True if the stored numbers are not the values, or if some of them stand for missing values.
        unseen_default: True if values can be missing only in records that were never written, and no such record was
            found.
        units: The attribute `units`, or "".
        problem: Reason why the values cannot be decoded, in words; "" if they can be decoded.
    """

    packing: dict[str, Any] = field(default_factory=dict)
    mask: list[str | None] | None = None
    said: list[str] = field(default_factory=list)
    changes: bool = False
    unseen_default: bool = False
    units: str = ""
    problem: str = ""

    @property
    def as_packing(self) -> Packing:
        return Packing(**self.packing)

    @property
    def is_time(self) -> bool:
        return " since " in self.units

    def as_json(self) -> dict[str, Any]:
        """Returns the arguments of `ValueMeaning` as JSON values; {} if the file states nothing."""
        return {} if self == NOTHING else asdict(self)


NOTHING = ValueMeaning()


class _Unclear(Exception):
    """Raised if the values of a dataset cannot be decoded, for example if an attribute is unclear.

    The message states the reason.
    """


def place_of_values(file: h5py.File, path: str) -> str:
    """Returns the path of the dataset that contains the values: `path` itself, unless anndata wrote a group there.

    The Python package anndata stores a nullable array, or a column of categories, as a group that contains a dataset of
    values or codes.
    """
    import h5py

    found = file.get(path)
    if not isinstance(found, h5py.Group):
        return path
    inside = dict.fromkeys(("nullable-integer", "nullable-boolean", "nullable-string-array"), "values")
    inside["categorical"] = "codes"
    name = inside.get(text_of(found.attrs.get("encoding-type")))
    return path if name is None or name not in found else f"{path.rstrip('/')}/{name}"


def value_meaning(
    file: h5py.File, *, path: str, member: str | None, dtype: str, dataset: h5py.Dataset | None = None
) -> ValueMeaning:
    """Returns what `file` states about the numbers of a dataset, or of a member of its compound type.

    For example, the file may state a scale, or which numbers stand for missing values. `path` is absolute and contains
    no soft links. `dtype` is the name of the numpy dtype of the stored elements. `dataset` is the dataset at `path` if
    it is already open; None: it is opened.
    """
    import h5py

    dataset = file[path] if dataset is None else dataset
    found = ValueMeaning()
    packing: dict[str, Any] = {}
    try:
        # Most datasets have no attributes; of 10,000 files each call counts.
        has_attributes = h5py.h5a.get_num_attrs(dataset.id) or h5py.h5a.exists(file.id, b"_NCProperties")
        if has_attributes and member is not None:
            packing = _packing(dataset, _of_member(dataset, member), np.dtype(dtype), found)
        elif has_attributes:
            packing = _packing(dataset, dataset.attrs, np.dtype(dtype), found)
            if np.any(dataset.attrs.get("MATLAB_empty", 0)):
                found.said.append("MATLAB_empty: it holds the dimensions of an empty array")
                raise _Unclear("the dataset holds the dimensions of an empty MATLAB array, not values")
            if "NAME" in dataset.attrs and text_of(dataset.attrs["NAME"]).startswith(_ONLY_A_DIMENSION):
                found.said.append("it is a dimension of netCDF, not a variable")
                raise _Unclear("the dataset is a dimension of netCDF, which has a length but no values")
        _add_neighbours(file, dataset, path, member, found, packing)
        if has_attributes:
            _add_pandas(dataset.attrs, member, found, packing)
            _refuse(said_by_attributes(dataset.attrs, np.dtype(dtype), of_table=member is not None), found)
        if member is None:
            _refuse(said_by_neighbours(file, path), found)
    except _Unclear as error:
        found.problem, found.changes = str(error), True
    found.packing = packing
    return found


def meaning_of_strings(
    file: h5py.File, *, path: str, member: str | None, dataset: h5py.Dataset
) -> ValueMeaning:
    """Returns what attributes or a mask state about missing strings in a dataset. Missing strings are not decoded."""
    found = ValueMeaning()
    names = set(dataset.attrs) if member is None else set()
    found.said = [f"{name} = {_shown(dataset.attrs, name)}" for name in _FILLS if name in names]
    try:
        _add_neighbours(file, dataset, path, member, found, {})
    except _Unclear as error:
        found.problem = str(error)
    if found.said:
        found.changes = True
        found.problem = found.problem or "missing strings are not decoded"
    return found


def _refuse(said: list[str], found: ValueMeaning) -> None:
    """Adds the texts `said`, about conventions other than CF, to `found.said`. Raises _Unclear if there are any.

    Values that follow these conventions are not decoded.
    """
    found.said += said
    if said:
        raise _Unclear(f"{said[0]} is not an attribute of CF, and is not decoded")


def _add_pandas(
    attributes: Mapping[str, Any], member: str | None, found: ValueMeaning, packing: dict[str, Any]
) -> None:
    """Adds to `found` and `packing` what the attributes of pandas state about integers.

    They may state that the integers are codes of categories, of which -1 is missing. They may state that the integers
    are times; then _Unclear is raised, since times are not decoded.
    """
    kind = pandas_kind(attributes, set(attributes), member)
    if kind == "category":
        found.said.append(f"-1 is missing, other numbers are places in the categories of {member}")
        packing["missing"], found.changes = [-1], True
    elif kind:
        found.said.append(f"{kind} of pandas, in which the smallest int64 is missing (NaT)")
        raise _Unclear(f"{kind} of pandas is not decoded")


def _of_member(dataset: h5py.Dataset, member: str) -> dict[str, Any]:
    """Returns the attributes of a member of a table, by name.

    An attribute of a table must be of a compound type with one value per member. Raises _Unclear for other attributes,
    since they do not state to which member they belong.
    """
    found: dict[str, Any] = {}
    names = set(dataset.attrs)
    for name in (name for name in _READ_ATTRIBUTES if name in names):
        try:
            value = np.asarray(dataset.attrs[name])
        except (TypeError, ValueError, OSError, RuntimeError):
            value = np.empty(0)
        if value.dtype.names is None:
            raise _Unclear(
                f"the table has an attribute {name} = {_shown(dataset.attrs, name)}, which does not say for which of "
                "the members it is"
            )
        if member in value.dtype.names:
            found[name] = value[member]
    return found


def _packing(
    dataset: h5py.Dataset, attributes: Mapping[str, Any], stored: np.dtype[Any], found: ValueMeaning
) -> dict[str, Any]:
    names = set(attributes)
    present = [name for name in _READ_ATTRIBUTES if name in names]
    found.said += [f"{name} = {_shown(attributes, name)}" for name in present]
    _add_units(attributes, found)
    packing: dict[str, Any] = {}
    data = stored
    if "_Unsigned" in present and stored.kind in "iu":
        unsigned = text_of(attributes["_Unsigned"]).lower()
        if unsigned not in ("true", "false"):
            raise _Unclear(f"_Unsigned = {unsigned!r} is neither true nor false")
        data = np.dtype(f"{'u' if unsigned == 'true' else ''}int{8 * stored.itemsize}")
        if data != stored:
            packing["stored_as"], found.changes = data.name, True
    scales = _scales(attributes, present, data)
    packing |= scales
    if scales and (scales.get("scale", 1), scales.get("offset", 0)) != (1, 0):
        found.changes = True
    missing = [value for name in _FILLS if name in present for value in _numbers(attributes, name)]
    kept = [_as_stored(value, stored=stored, data=data) for value in missing]
    packing["missing"] = list(dict.fromkeys(value for value in kept if value == value))
    packing["nan_is_missing"] = any(value != value for value in kept)
    _add_range(attributes, present, packing, stored=stored, data=data)
    if packing["missing"] or "least" in packing or "most" in packing:
        found.changes = True
    # netCDF fills what was never written with its default unless there is a _FillValue; missing_value does not count.
    if "_FillValue" not in present and (default := _default_fill(dataset, stored)) is not None:
        unwritten = _as_stored(stored.type(default), stored=stored, data=data)
        says_nothing_else = not packing["missing"] and not {"float_dtype", "least", "most"} & set(packing)
        packing["missing"] = list(dict.fromkeys([*packing["missing"], unwritten]))
        if _may_be_unwritten(dataset, stored.type(default)):
            found.changes = True
            found.said.append(f"records that were never written ({unwritten!r}, netCDF's default)")
        else:
            found.unseen_default = says_nothing_else
    if packing.get("stored_as") == "uint64" and "float_dtype" not in packing and not packing["missing"]:
        raise _Unclear("the values are uint64 by _Unsigned, which torch cannot compute with")
    return packing


def _scales(attributes: Any, present: list[str], data: np.dtype[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dtypes: list[np.dtype[Any]] = []
    for name, key in (("scale_factor", "scale"), ("add_offset", "offset")):
        if name not in present:
            continue
        values = _numbers(attributes, name)
        if len(values) != 1 or not np.isfinite(values[0]):
            raise _Unclear(f"{name} is {_shown(attributes, name)}: one finite number is expected")
        found[key] = _plain(values[0])
        dtypes.append(values[0].dtype if values[0].dtype.kind == "f" else np.dtype("float64"))
    if found:
        # The type of the attributes, but no smaller one than the values need: CF allows float for two bytes only.
        if data.kind == "f" or data.itemsize > 2:
            dtypes.append(data if data.kind == "f" else np.dtype("float64"))
        wide = np.result_type(np.float32, *dtypes)
        found["float_dtype"] = "float32" if wide == np.float32 else "float64"
    return found


def _add_range(
    attributes: Any,
    present: list[str],
    packing: dict[str, Any],
    *,
    stored: np.dtype[Any],
    data: np.dtype[Any],
) -> None:
    limits: dict[str, Any] = {}
    if "valid_range" in present:
        values = _numbers(attributes, "valid_range")
        if len(values) != 2:
            raise _Unclear(f"valid_range is {_shown(attributes, 'valid_range')}: two numbers are expected")
        limits = {"least": values[0], "most": values[1]}
    for name, key in (("valid_min", "least"), ("valid_max", "most")):
        if name in present:
            values = _numbers(attributes, name)
            if len(values) != 1:
                raise _Unclear(f"{name} is {_shown(attributes, name)}: one number is expected")
            limits[key] = values[0]
    if not limits:
        return
    # NetCDF User's Guide: a range of the wider type of scale_factor and add_offset is one of unpacked values.
    floats = all(value.dtype.kind == "f" for value in limits.values())
    packing["of_decoded"] = floats and data.kind in "iu" and "float_dtype" in packing
    for key, value in limits.items():
        if value != value:
            raise _Unclear("a limit of valid values is NaN")
        unsigned = packing.get("stored_as") is not None and not floats
        packing[key] = _as_stored(value, stored=stored, data=data) if unsigned else _plain(value)


def _members(dataset: h5py.Dataset) -> list[str]:
    """Returns the names of all members of a table, including members for which numpy has no dtype."""
    kind = dataset.id.get_type()
    return [kind.get_member_name(number).decode("utf-8", "replace") for number in range(kind.get_nmembers())]


def _add_neighbours(
    file: h5py.File, dataset: h5py.Dataset, path: str, member: str | None, found: ValueMeaning,
    packing: dict[str, Any],
) -> None:  # fmt: skip
    if member is not None:
        if f"{member}.mask" in _members(dataset):
            found.mask = [path, f"{member}.mask"]
    else:
        group, _, name = path.rpartition("/")
        kind = ""
        if name in ("values", "codes"):  # of anndata's groups
            kind = text_of(file[group or "/"].attrs.get("encoding-type"))
        if kind.startswith("nullable-") and name == "values" and _is_dataset(file, f"{group}/mask"):
            found.mask = [f"{group}/mask", None]
        elif _is_dataset(file, f"{path}.mask"):
            found.mask = [f"{path}.mask", None]
        elif kind == "categorical" and name == "codes" and dataset.dtype.kind == "i":
            found.said.append(f"-1 is missing, other numbers are places in {group}/categories")
            packing["missing"], found.changes = [-1], True
    if found.mask is not None:
        found.said.append(f"a mask of missing values, {':'.join(filter(None, found.mask))}")
        found.changes = True
        if found.mask[1] is None and file[found.mask[0]].shape != dataset.shape:
            raise _Unclear(
                f"the mask {found.mask[0]} has shape {file[found.mask[0]].shape}, not {dataset.shape}"
            )


def _is_dataset(file: h5py.File, path: str) -> bool:
    """Returns True if there is a dataset at `path`, and it is in this file, not in another. Its group must exist."""
    import h5py

    if not file.id.links.exists(path.encode()):
        return False
    return isinstance(file.get(path, getlink=True), h5py.HardLink) and isinstance(file[path], h5py.Dataset)


def _add_units(attributes: Any, found: ValueMeaning) -> None:
    found.units = text_of(attributes.get("units")) if "units" in attributes else ""
    if found.is_time:
        calendar = text_of(attributes["calendar"]) if "calendar" in attributes else "standard"
        found.said.append(f"times in {found.units!r}, calendar {calendar}")


def _default_fill(dataset: h5py.Dataset, stored: np.dtype[Any]) -> int | float | None:
    """Returns the default fill value of netCDF, if the dataset was created by the netCDF library with this value.

    Returns None otherwise. `stored` is the dtype of the dataset's elements.
    """
    import h5py

    default = _DEFAULT_FILLS.get(stored.name)
    if default is None or isinstance(dataset.id.get_type(), h5py.h5t.TypeCompoundID):
        return None
    marks = ("_Netcdf4Dimid", "_Netcdf4Coordinates", "DIMENSION_LIST")
    is_netcdf = "_NCProperties" in dataset.file.attrs or any(mark in dataset.attrs for mark in marks)
    try:
        fill = dataset.fillvalue
    except (RuntimeError, ValueError, TypeError):
        return None
    # Variable lengths have an array of no elements.
    return default if is_netcdf and np.ndim(fill) == 0 and fill == stored.type(default) else None


def _may_be_unwritten(dataset: h5py.Dataset, default: Any) -> bool:
    """Returns True if records of the dataset seem never to have been written.

    That is so if no storage was allocated, or if the first, a middle or the last row contains the default fill value
    `default`.
    """
    if not dataset.id.get_storage_size():
        return True
    if not dataset.shape:
        return bool(dataset[()] == default)
    rows = sorted({0, dataset.shape[0] // 2, dataset.shape[0] - 1})[:_SEEN_ROWS]
    return any(bool(np.any(dataset[row] == default)) for row in rows)


def _as_stored(value: Any, *, stored: np.dtype[Any], data: np.dtype[Any]) -> int | float:
    """Converts the number `value`, which an attribute contains, to the dtype `data`.

    `stored` is the dtype of the stored elements. `data` is the same dtype, but unsigned if the attribute `_Unsigned`
    says so. Raises _Unclear if the number cannot be stored.
    """
    if stored.kind == "f":
        return float(stored.type(value))
    if not np.isfinite(value) or value != int(value):
        raise _Unclear(f"{value!r} cannot be stored as {stored.name}")
    number = int(value)
    if stored.kind == "b":
        stored = data = np.dtype("uint8")
    for dtype in (data, stored):
        limits = np.iinfo(dtype)
        if limits.min <= number <= limits.max:
            return int(np.array(number, dtype=dtype).view(data))
    raise _Unclear(f"{number} cannot be stored as {data.name}")


def _numbers(attributes: Any, name: str) -> list[Any]:
    """Returns the numbers in the attribute `name` as numpy scalars; texts that are numbers are converted.

    Raises _Unclear if the attribute contains no numbers.
    """
    try:
        value = attributes[name]
        array: NDArray[Any] = np.asarray(value).reshape(-1)
        if array.dtype.kind in "SUO":
            array = np.array([float(text_of(one)) for one in array.tolist()])
    except (TypeError, ValueError, OSError, RuntimeError, KeyError) as error:
        raise _Unclear(f"the attribute {name} is not a number ({error})") from error
    if array.dtype.kind not in "iufb" or not len(array):
        raise _Unclear(f"the attribute {name} is {_shown(attributes, name)}, which is not a number")
    if array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return list(array.astype(array.dtype.newbyteorder("=")))


def _plain(value: Any) -> int | float:
    return float(value) if value.dtype.kind == "f" else int(value)


def _shown(attributes: Any, name: str) -> str:
    try:
        value = attributes[name]
    except (TypeError, ValueError, OSError, RuntimeError, KeyError):
        return "of a type that is not read"
    if isinstance(value, (bytes, str)):
        return repr(text_of(value))
    array = np.asarray(value).reshape(-1)
    if array.dtype.kind in "SO":
        return ", ".join(repr(text_of(one)) for one in array.tolist()[:4])
    return ", ".join(f"{one:g}" if array.dtype.kind == "f" else str(one) for one in array[:4]) or "empty"
