"""Compares types of HDF5 files with numpy's: which elements have the same bytes, which ones HDF5 must convert.

An HDF5 type has properties that numpy has no name for: an integer may use 12 of its 16 bits, a float of 2 bytes may
have 8 exponent bits. h5py reads such elements as the next larger numpy dtype; their stored bytes mean something else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import h5py


def dtype_of(kind: h5py.h5t.TypeID) -> np.dtype[Any] | None:
    """Returns the dtype as which h5py reads elements of type `kind`; None if numpy has none (times, 24-bit integers).

    A compound has the members that can be read; the other ones are left out.
    """
    import h5py

    try:
        dtype: np.dtype[Any] = kind.dtype
        return dtype
    except (TypeError, ValueError, OverflowError, LookupError, RuntimeError):
        if not isinstance(kind, h5py.h5t.TypeCompoundID):
            return None
    members = [(name, dtype_of(member)) for name, member in members_of(kind).items()]
    readable = [(name, dtype) for name, dtype in members if dtype is not None]
    return np.dtype(readable) if readable else None


def members_of(kind: h5py.h5t.TypeCompoundID) -> dict[str, h5py.h5t.TypeID]:
    """Returns the types of the members of a compound, by name."""
    return {
        kind.get_member_name(number).decode("utf-8", "surrogateescape"): kind.get_member_type(number)
        for number in range(kind.get_nmembers())
    }


def element_of(kind: h5py.h5t.TypeID, *, member: str | None = None) -> h5py.h5t.TypeID:
    """Returns the type of the numbers in elements of type `kind`, or in a member of a compound.

    That is the base of array types and of variable lengths.
    """
    from h5py import h5t

    if member is not None and isinstance(kind, h5t.TypeCompoundID):
        kind = members_of(kind)[member]
    while isinstance(kind, h5t.TypeArrayID | h5t.TypeVlenID):
        kind = kind.get_super()
    return kind


def why_not_converted(kind: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> str | None:
    """Returns why HDF5 cannot convert stored numbers to `dtype`, as it says it; None if it can.

    Shown with two elements, since some of HDF5's functions refuse only when they meet a number.
    """
    from h5py import h5t

    memory = h5t.py_create(dtype)
    data = np.full(2 * max(kind.get_size(), memory.get_size()), 0x35, dtype=np.uint8)
    try:
        h5t.convert(kind, memory, 2, data, np.zeros_like(data))
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return None


def has_numpys_bytes(kind: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> bool:
    """True if stored elements of type `kind` are, byte for byte, numpy's elements of `dtype` in its byte order.

    That holds only if every property is the same: class, size, byte order, precision, bit offset, sign; of floats also
    the place and size of exponent and mantissa, bias and normalisation; of enums also names and values of the members.
    False for compounds, strings, references and variable lengths, which are always read by HDF5.
    """
    from h5py import h5t

    if isinstance(kind, h5t.TypeArrayID):
        return has_numpys_bytes(kind.get_super(), dtype.base)
    if isinstance(kind, h5t.TypeEnumID):
        return bool(kind.equal(h5t.py_create(dtype, logical=True)))
    if isinstance(kind, h5t.TypeBitfieldID):  # h5py has no functions for its precision and offset
        return any(kind.equal(same) for same in _bit_fields(dtype))
    if not isinstance(kind, h5t.TypeIntegerID | h5t.TypeFloatID):
        return False
    if kind.equal(_type_of(dtype.str)):  # nearly always; the rest is for properties that mean nothing here
        return True
    size = kind.get_size()
    if (size, 8 * size, 0) != (dtype.itemsize, kind.get_precision(), kind.get_offset()):
        return False
    if size > 1 and kind.get_order() != (h5t.ORDER_LE if _is_little_endian(dtype) else h5t.ORDER_BE):
        return False
    if isinstance(kind, h5t.TypeFloatID):
        return dtype.kind == "f" and _format(kind) == _format(h5t.py_create(dtype))
    return dtype.kind == ("i" if kind.get_sign() == h5t.SGN_2 else "u")


@lru_cache
def _type_of(dtype: str) -> h5py.h5t.TypeID:
    from h5py import h5t

    return h5t.py_create(np.dtype(dtype))


def _bit_fields(dtype: np.dtype[Any]) -> list[h5py.h5t.TypeID]:
    """Returns the HDF5 bit fields that use all bits of numpy's unsigned integers of `dtype`."""
    from h5py import h5t

    if dtype.kind != "u":
        return []
    order = "LE" if _is_little_endian(dtype) else "BE"
    return [getattr(h5t, f"STD_B{8 * dtype.itemsize}{order}")]


def _format(kind: h5py.h5t.TypeFloatID) -> tuple[Any, ...]:
    return (*kind.get_fields(), kind.get_ebias(), kind.get_norm())


def _is_little_endian(dtype: np.dtype[Any]) -> bool:
    return dtype.newbyteorder("<") == dtype


def describe(kind: h5py.h5t.TypeID) -> str:
    """Returns an HDF5 type that numpy does not have, in words."""
    from h5py import h5t

    names = {
        h5t.INTEGER: "integers",
        h5t.FLOAT: "floats",
        h5t.TIME: "times (H5T_TIME)",
        h5t.BITFIELD: "bit fields",
        h5t.ENUM: "an enumeration",
        h5t.COMPOUND: "a compound",
        h5t.ARRAY: "arrays",
        h5t.OPAQUE: "opaque elements",
        h5t.VLEN: "variable lengths",
    }
    return f"{names.get(kind.get_class(), 'elements')} of {kind.get_size()} bytes"
