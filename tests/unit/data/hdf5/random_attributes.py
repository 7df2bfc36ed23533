"""Draws attributes and masks that say something of a dataset's values, and computes what they mean, in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from tests.unit.data.hdf5.random_types import Drawn, Random


class Said(NamedTuple):
    """attributes: names and values. mask: path of a mask, shape of the dataset, or "". of_table: of a compound, so that
    they do not say which member they are of."""

    attributes: dict[str, Any]
    mask: str = ""
    of_table: bool = False

    @property
    def texts(self) -> str:
        return f"attributes {self.attributes} {self.mask}" if self.attributes or self.mask else ""


def add_attributes(dataset: h5py.Dataset, drawn: Drawn, random: Random) -> Said:
    """Adds attributes to a quarter of the datasets of plain numbers, and to some tables."""
    is_plain = drawn.numpy is not None and drawn.numpy.subdtype is None
    if drawn.member is not None and random.random() < 0.1:
        dataset.attrs["scale_factor"] = 0.5
        return Said({"scale_factor": 0.5}, of_table=True)
    if not is_plain or dataset.shape is None or random.random() > 0.25:
        return Said({})
    assert drawn.numpy is not None
    dtype = drawn.numpy
    chosen: dict[str, Any] = {}
    if random.random() < 0.5:
        chosen["scale_factor"] = _float(random)
    if random.random() < 0.4:
        chosen["add_offset"] = _float(random)
    if random.random() < 0.4:
        chosen["_FillValue"] = _values(dtype, random, 1)
    if random.random() < 0.3:
        chosen["missing_value"] = _values(dtype, random, int(random.integers(1, 4)))
    if dtype.kind in "iu" and random.random() < 0.2:
        chosen["_Unsigned"] = str(random.choice(["true", "false", "True"]))
    if random.random() < 0.15:
        chosen["valid_range"] = np.sort(_values(dtype, random, 2))
    elif random.random() < 0.2:
        chosen[str(random.choice(["valid_min", "valid_max"]))] = _values(dtype, random, 1)
    if random.random() < 0.2:
        chosen["units"] = "days since 2000-01-01" if random.random() < 0.3 else "K"
    for name, value in chosen.items():
        dataset.attrs[name] = value
    mask = ""
    if random.random() < 0.15 and dataset.shape:
        mask = f"{dataset.file.get('x', getlink=True).path if _is_soft(dataset.file) else '/x'}.mask"
        dataset.file[mask] = random.integers(0, 2, dataset.shape).astype(bool)
    return Said(chosen, mask)


def _is_soft(file: h5py.File) -> bool:
    return isinstance(file.get("x", getlink=True), h5py.SoftLink)


def _float(random: Random) -> Any:
    value = float(random.choice([0.5, 0.01, 2.0, 10.0, -3.25, 1.0]))
    return np.float32(value) if random.random() < 0.4 else np.float64(value)


def _values(dtype: np.dtype[Any], random: Random, count: int) -> NDArray[Any]:
    """Returns numbers that are not negative, so that they mean the same with any sign."""
    return random.integers(0, 100, count).astype(dtype)


@np.errstate(over="ignore", invalid="ignore")
def meant(stored: NDArray[Any], said: Said, mask: NDArray[Any] | None) -> NDArray[np.float64]:
    """Returns the values in float64, missing ones as NaN. stored: as h5py reads them."""
    data, attributes = stored.astype(stored.dtype.newbyteorder("=")), said.attributes
    if "_Unsigned" in attributes:
        sign = "" if attributes["_Unsigned"].lower() == "false" else "u"
        data = data.view(f"{sign}int{8 * data.dtype.itemsize}")
    missing = np.zeros(data.shape, bool) if mask is None else mask.astype(bool)
    for name in ("_FillValue", "missing_value"):
        missing = missing | np.isin(data, attributes.get(name, []))
    least, most = attributes.get("valid_range", (None, None))
    least, most = attributes.get("valid_min", least), attributes.get("valid_max", most)
    if least is not None:
        missing = missing | (data < least)
    if most is not None:
        missing = missing | (data > most)
    values = data.astype(np.float64)
    values = values * float(attributes.get("scale_factor", 1)) + float(attributes.get("add_offset", 0))
    return np.where(missing, np.nan, values).reshape(stored.shape)
