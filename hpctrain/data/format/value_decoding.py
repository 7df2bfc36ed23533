"""How the stored values of a field become the values that they mean: scale, offset, missing values. Pure.

Source of the rules: CF Conventions 1.11, sections 2.5.1 (missing data) and 8.1 (packed data), and the NetCDF User's
Guide, appendix A (attribute conventions).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest_entries import Decoding, FieldSpec, Packing
from hpctrain.errors import DataError

MASK_SUFFIX = ".mask"
_EXACT_IN_FLOAT64 = 1 << 53


def decoded_fields(fields: dict[str, FieldSpec], decoding: dict[str, Decoding]) -> dict[str, FieldSpec]:
    """Returns the fields of a batch after decoding, in the order of `fields`."""
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
def decode(
    stored: NDArray[Any],
    *,
    packing: Packing,
    decoding: Decoding,
    mask: NDArray[Any] | None = None,
    is_exact: bool = True,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Returns the decoded values and where they are missing, both of the shape of `stored`.

    stored: as in the file, native-endian. mask: not 0 where a value is missing, of the same shape.
    Raises DataError if an integer is too large for the decoded dtype, unless not `is_exact`: then it is rounded; and
    for a missing value if they are refused.
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
                f"{data[missing].flat[0]} is what netCDF leaves in a record that was never written, and the field has "
                "integers: index it with --missing nan, mask or a number"
            )
        values[missing] = {"nan": np.nan, "value": decoding.value, "mask": 0}[decoding.missing]
    return values, missing


def _outside(data: NDArray[Any], packing: Packing) -> NDArray[np.bool_]:
    """NaN is not outside. The limits of floats are rounded to their dtype, as the values were."""
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
            f"the value {data[large].flat[0]} is too large for {dtype.name}, which a field with NaN for missing values "
            "has: index it with a number or a mask for them"
        )
