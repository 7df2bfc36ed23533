"""Draws HDF5 types: all classes, also with properties that numpy has no name for, and stored elements of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5t
from numpy.typing import NDArray

Random = np.random.Generator
ORDERS = (h5t.ORDER_LE, h5t.ORDER_BE)
NUMBERS = ["i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8",
           "<f2", ">f2", "<f4", "<f4", ">f4", "<f8", ">f8"]  # fmt: skip


class Drawn(NamedTuple):
    """A type, and its stored elements as bytes: `elements(count)` has shape (count, bytes of an element).

    numpy: dtype whose elements have these bytes, if that is known for certain. is_stored_raw: False for elements that
    contain addresses, which are written through h5py: `values`.
    """

    name: str
    kind: h5t.TypeID
    elements: Callable[[int], NDArray[np.uint8]]
    numpy: np.dtype[Any] | None = None
    values: Callable[[int], NDArray[Any]] | None = None
    member: str | None = None


def draw(random: Random) -> Drawn:
    """Returns any type; numpy's own are the most frequent."""
    makers: list[tuple[Callable[[Random], Drawn], int]] = [
        (_number, 40), (_integer, 14), (_float, 12), (_enumeration, 8), (_array, 7), (_compound, 12), (_bit_field, 2),
        (_string, 3), (_time, 1), (_opaque, 1), (_reference, 1), (_variable_length, 3), (_complex, 1),
    ]  # fmt: skip
    weights = np.array([weight for _, weight in makers], dtype=float)
    return makers[int(random.choice(len(makers), p=weights / weights.sum()))][0](random)


def _bits(random: Random, size: int) -> Callable[[int], NDArray[np.uint8]]:
    return lambda count: random.integers(0, 256, (count, size), dtype=np.uint8)


def _as_bytes(values: NDArray[Any], size: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), size)


def _number(random: Random) -> Drawn:
    dtype = np.dtype(str(random.choice(NUMBERS)))

    def elements(count: int) -> NDArray[np.uint8]:
        values = random.normal(0, 100, count) if dtype.kind == "f" else random.integers(0, 100, count)
        return _as_bytes(values.astype(dtype), dtype.itemsize)

    made = _bits(random, dtype.itemsize) if random.random() < 0.3 else elements
    return Drawn(f"number {dtype.str}", h5t.py_create(dtype), made, numpy=dtype)


def _integer(random: Random) -> Drawn:
    """Integers with any precision, bit offset, padding and size, of 1 to 8 bytes."""
    size = int(random.choice([1, 1, 2, 2, 2, 4, 4, 8, 3, 5, 6, 7]))
    kind = (h5t.STD_I64LE if random.random() < 0.5 else h5t.STD_U64LE).copy()
    precision = 8 * size if random.random() < 0.3 else int(random.integers(1, 8 * size + 1))
    kind.set_precision(precision)
    kind.set_offset(0)
    kind.set_size(size)
    if random.random() < 0.5:
        kind.set_offset(int(random.integers(0, 8 * size - precision + 1)))
    kind.set_order(int(random.choice(ORDERS)))
    kind.set_pad(*(int(pad) for pad in random.choice([h5t.PAD_ZERO, h5t.PAD_ONE], 2)))
    return Drawn(f"integer of {size} bytes, {precision} bits", kind, _bits(random, size))


# name: bits, exponent bits, mantissa bits, bias
FLOATS = {
    "bfloat16": (16, 8, 7, 127), "tf32": (32, 8, 10, 127), "e4m3": (8, 4, 3, 7), "e5m2": (8, 5, 2, 15),
    "half": (16, 5, 10, 15), "single": (32, 8, 23, 127), "double": (64, 11, 52, 1023), "24 bits": (24, 8, 15, 127),
    "half with another bias": (16, 5, 10, 16), "single with another bias": (32, 8, 23, 120),
    "wide mantissa": (16, 4, 11, 7), "short single": (32, 7, 24, 63),
}  # fmt: skip


def _float(random: Random) -> Drawn:
    if random.random() < 0.1:
        return Drawn("long double", h5t.NATIVE_LDOUBLE.copy(), _bits(random, h5t.NATIVE_LDOUBLE.get_size()))
    name = str(random.choice(list(FLOATS)))
    bits, exponent, mantissa, bias = FLOATS[name]
    kind = h5t.IEEE_F64LE.copy()
    used = 1 + exponent + mantissa
    low = int(random.integers(0, bits - used + 1))
    kind.set_fields(low + used - 1, low + mantissa, exponent, low, mantissa)
    if random.random() < 0.5:
        kind.set_precision(bits)
    kind.set_size(bits // 8)
    kind.set_ebias(bias)
    if random.random() < 0.2:
        kind.set_norm(int(random.choice([h5t.NORM_IMPLIED, h5t.NORM_MSBSET, h5t.NORM_NONE])))
    kind.set_order(int(random.choice(ORDERS)))
    return Drawn(f"float {name}", kind, _bits(random, bits // 8))


def _enumeration(random: Random) -> Drawn:
    base = np.dtype(str(random.choice(["i1", "i1", "u1", "<i2", ">i2", "<i4", ">i4", "<u4", "<i8"])))
    kind = h5t.enum_create(h5t.py_create(base))
    names = [b"FALSE", b"TRUE"] if random.random() < 0.5 else [b"red", b"green", b"blue"]
    values = [0, 1, 2] if random.random() < 0.8 else [1, 0, 5]
    for name, value in zip(names, values, strict=False):
        kind.enum_insert(name, value)
    known = values[: len(names)] + ([77] if random.random() < 0.2 else [])

    def elements(count: int) -> NDArray[np.uint8]:
        return _as_bytes(random.choice(known, count).astype(base), base.itemsize)

    return Drawn(f"enumeration of {base.str}, {len(names)} names", kind, elements)


def _array(random: Random) -> Drawn:
    return array_of(
        [_number, _number, _integer, _float, _enumeration][int(random.integers(5))](random), random
    )


def array_of(base: Drawn, random: Random) -> Drawn:
    dims = tuple(int(size) for size in random.integers(1, 4, int(random.integers(1, 3))))
    count = int(np.prod(dims))
    kind = h5t.array_create(base.kind, dims)
    numpy = None if base.numpy is None else np.dtype((base.numpy, dims))
    return Drawn(f"array {dims} of {base.name}", kind,
                 lambda n: base.elements(n * count).reshape(n, -1), numpy=numpy)  # fmt: skip


def table_of(
    members: list[Drawn], gaps: NDArray[np.int64]
) -> tuple[h5t.TypeID, Callable[[int], NDArray[np.uint8]]]:
    """Returns a compound type and its elements. gaps: bytes in front of each member, and behind the last."""
    size = sum(member.kind.get_size() for member in members) + int(gaps[: len(members) + 1].sum())
    kind = h5t.create(h5t.COMPOUND, size)
    offset, offsets = int(gaps[0]), []
    for number, member in enumerate(members):
        kind.insert(f"m{number}".encode(), offset, member.kind)
        offsets.append(offset)
        offset += member.kind.get_size() + int(gaps[number + 1])

    def elements(count: int) -> NDArray[np.uint8]:
        made = np.zeros((count, size), dtype=np.uint8)
        for at, member in zip(offsets, members, strict=True):
            made[:, at : at + member.kind.get_size()] = member.elements(count)
        return made

    return kind, elements


def _compound(random: Random) -> Drawn:
    makers = [_number, _number, _number, _integer, _float, _enumeration, _array, _time, _string, _complex]
    members = [makers[int(random.integers(len(makers)))](random) for _ in range(int(random.integers(1, 5)))]
    gaps = random.integers(0, 4, len(members) + 1) if random.random() < 0.5 else np.zeros(9, int)
    kind, elements = table_of(members, gaps)
    chosen = int(random.integers(len(members)))
    if any(member.values is not None for member in members):
        return _compound(random)
    names = ", ".join(member.name for member in members)
    return Drawn(f"member {chosen} of a table of {names}", kind, elements, member=f"m{chosen}")


def _complex(random: Random) -> Drawn:
    return Drawn("complex", h5t.py_create(np.dtype("c8")), _bits(random, 8))


def _bit_field(random: Random) -> Drawn:
    name = str(random.choice([f"STD_B{bits}{order}" for bits in (8, 16, 32, 64) for order in ("LE", "BE")]))
    kind = getattr(h5t, name)
    return Drawn(f"bit field {name}", kind, _bits(random, kind.get_size()))


def _time(random: Random) -> Drawn:
    kind = [h5t.UNIX_D32LE, h5t.UNIX_D32BE, h5t.UNIX_D64LE, h5t.UNIX_D64BE][int(random.integers(4))]
    return Drawn("time", kind, _bits(random, kind.get_size()))


def _opaque(random: Random) -> Drawn:
    # h5py takes the size of the dtype that the tag names, and may write over the end of its buffer for another one.
    size, tag = (8, b"NUMPY:datetime64[s]") if random.random() < 0.5 else (4, b"pixels")
    kind = h5t.create(h5t.OPAQUE, size)
    kind.set_tag(tag)
    return Drawn("opaque", kind, _bits(random, size))


def _reference(random: Random) -> Drawn:
    return Drawn("reference", h5t.STD_REF_OBJ, lambda count: np.zeros((count, 8), dtype=np.uint8))


WORDS = ["north", "south", "", "west", "ö", "a longer name"]


def _string(random: Random) -> Drawn:
    if random.random() < 0.5:
        kind = h5t.py_create(h5py.string_dtype(), logical=True)
        return Drawn("string of variable length", kind, _bits(random, 1),
                     values=lambda count: random.choice(np.array(WORDS, dtype=object), count))  # fmt: skip
    kind = h5t.C_S1.copy()
    kind.set_size(16)
    kind.set_strpad(int(random.choice([h5t.STR_NULLTERM, h5t.STR_NULLPAD, h5t.STR_SPACEPAD])))
    kind.set_cset(int(random.choice([h5t.CSET_ASCII, h5t.CSET_UTF8])))

    def elements(count: int) -> NDArray[np.uint8]:
        words = np.array([word.encode().ljust(12) for word in random.choice(WORDS, count)], dtype="S16")
        return _as_bytes(words, 16)

    return Drawn("string of fixed length", kind, elements)


def _variable_length(random: Random) -> Drawn:
    base = np.dtype(str(random.choice(["<i4", "<f4", "<f8", "u1", ">i4"])))
    kind = h5t.py_create(h5py.vlen_dtype(base), logical=True)

    def values(count: int) -> NDArray[Any]:
        rows = np.empty(count, dtype=object)
        for number in range(count):
            rows[number] = random.integers(0, 100, int(random.integers(0, 5))).astype(base)
        return rows

    return Drawn(f"variable length of {base.str}", kind, _bits(random, 1), values=values)
