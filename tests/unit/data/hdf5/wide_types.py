"""Draws HDF5 types within types: compounds in compounds, arrays of arrays, variable lengths of anything, odd enums.

As `random_types`, whose types are the innermost ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5p, h5t
from numpy.typing import NDArray

from tests.unit.data.hdf5 import random_types
from tests.unit.data.hdf5.random_types import NUMBERS, WORDS, Drawn, Random

# Functions of HDF5 that h5py does not have; its modules are linked with the library.
LIBRARY = ctypes.CDLL(h5p.__file__)
MAX_DEPTH = 3


class Wide(NamedTuple):
    """A type whose elements are written in two parts.

    drawn: its `elements(count)` are those of `memory`, shape (count, bytes of `memory`). memory: `drawn.kind` without
    the members that contain addresses; None: nothing is left. through_h5py: member -> values of these members.
    """

    drawn: Drawn
    memory: h5t.TypeID | None
    through_h5py: dict[str, Callable[[int], NDArray[Any]]]


def draw_wide(random: Random) -> Wide:
    """Returns any type."""
    makers = [(_plain, 40), (_table, 30), (_array_of, 10), (_enum, 6), (_bit_field, 4), (_opaque, 2), (_region, 1),
              (_variable, 7)]  # fmt: skip
    weights = np.array([weight for _, weight in makers], dtype=float)
    maker = makers[int(random.choice(len(makers), p=weights / weights.sum()))][0]
    found = maker(random)
    if isinstance(found, Wide):
        return found
    return Wide(found, found.kind if found.values is None else None, {})


def _plain(random: Random) -> Drawn:
    return random_types.draw(random) if random.random() < 0.5 else random_types._number(random)


def _inner(random: Random, depth: int) -> Drawn:
    """Returns a type without addresses, perhaps with others inside."""
    makers: list[Callable[[Random], Drawn]] = [
        random_types._number, random_types._number, random_types._integer, random_types._float, _enum, _bit_field,
        random_types._array, random_types._string, random_types._complex, random_types._time, _opaque,
        random_types._reference,
    ]  # fmt: skip
    if depth < MAX_DEPTH and random.random() < 0.3:
        choice = random.random()
        return _compound(random, depth + 1) if choice < 0.6 else _array_of(random, depth + 1)
    while True:
        made = makers[int(random.integers(len(makers)))](random)
        if made.values is None:
            return made


def _compound(random: Random, depth: int) -> Drawn:
    members = [_inner(random, depth) for _ in range(int(random.integers(1, 4)))]
    gaps = random.integers(0, 4, 4) if random.random() < 0.5 else np.zeros(4, int)
    kind, elements = random_types.table_of(members, gaps)
    return Drawn(f"table of ({', '.join(member.name for member in members)})", kind, elements)


def _array_of(random: Random, depth: int = 1) -> Drawn:
    return random_types.array_of(_inner(random, depth), random)


def _table(random: Random) -> Wide:
    """A table, of whose members some may have a variable length."""
    members = [_inner(random, 1) for _ in range(int(random.integers(1, 5)))]
    if random.random() < 0.3:
        members.insert(int(random.integers(len(members) + 1)), _of_values(random))
    gap = int(random.choice([0, 0, 1, 5]))
    size = sum(member.kind.get_size() + gap for member in members)
    kind, memory = h5t.create(h5t.COMPOUND, size), h5t.create(h5t.COMPOUND, size)
    offset, offsets, through_h5py = 0, [], {}
    for number, member in enumerate(members):
        kind.insert(f"m{number}".encode(), offset, member.kind)
        if member.values is None:
            memory.insert(f"m{number}".encode(), offset, member.kind)
        else:
            through_h5py[f"m{number}"] = member.values
        offsets.append(offset)
        offset += member.kind.get_size() + gap

    def elements(count: int) -> NDArray[np.uint8]:
        made = np.zeros((count, size), dtype=np.uint8)
        for at, member in zip(offsets, members, strict=True):
            if member.values is None:
                made[:, at : at + member.kind.get_size()] = member.elements(count)
        return made

    chosen = int(random.integers(len(members)))
    names = ", ".join(member.name for member in members)
    drawn = Drawn(f"member {chosen} of a table of {names}", kind, elements, member=f"m{chosen}")
    return Wide(drawn, memory if len(through_h5py) < len(members) else None, through_h5py)


def _of_values(random: Random) -> Drawn:
    made = random_types._variable_length(random)
    if random.random() < 0.5:
        kind = h5t.py_create(h5py.string_dtype(), logical=True)
        return made._replace(
            name="string of variable length", kind=kind,
            values=lambda count: random.choice(np.array(WORDS, dtype=object), count),
        )  # fmt: skip
    return made


def _variable(random: Random) -> Drawn:
    """Variable lengths of numbers, strings, arrays, tables, enumerations and variable lengths."""
    if random.random() < 0.5:
        return _of_values(random)
    base = _inner(random, 1).kind
    if random.random() < 0.3:
        base = h5t.vlen_create(base)
    empty: list[Any] = []
    return Drawn("variable length of another type", h5t.vlen_create(base),
                 lambda count: np.zeros((count, 16), np.uint8), values=lambda _: np.array(empty))  # fmt: skip


def _enum(random: Random) -> Drawn:
    """Enumerations of any integers, also of 12 bits, with values at the ends of their range."""
    if random.random() < 0.5:
        return random_types._enumeration(random)
    base = np.dtype(str(random.choice(NUMBERS[:11])))
    inner = h5t.py_create(base)
    bits = 8 * base.itemsize
    if random.random() < 0.5:
        inner = inner.copy()
        bits = int(random.integers(4, bits + 1))
        inner.set_precision(bits)
    kind = h5t.enum_create(inner)
    most = (1 << (bits - (1 if base.kind == "i" else 0))) - 1
    values = sorted({0, 1, int(random.integers(2, 8)) % (most + 1), min(most, (1 << 62))})
    for number, value in enumerate(values):
        kind.enum_insert(f"name {number}".encode(), value)

    def elements(count: int) -> NDArray[np.uint8]:
        return random_types._as_bytes(random.choice(values, count).astype(base), base.itemsize)

    return Drawn(f"enumeration of {bits} bits of {base.str}, {values}", kind, elements)


def _bit_field(random: Random) -> Drawn:
    """Bit fields of any precision and offset."""
    made = random_types._bit_field(random)
    kind, size = made.kind.copy(), made.kind.get_size()
    precision = int(random.integers(1, 8 * size + 1))
    identity = ctypes.c_int64(kind.id)
    LIBRARY.H5Tset_precision(identity, ctypes.c_size_t(precision))
    LIBRARY.H5Tset_offset(identity, ctypes.c_size_t(int(random.integers(0, 8 * size - precision + 1))))
    return Drawn(f"{made.name} of {precision} bits", kind, random_types._bits(random, kind.get_size()))


def _opaque(random: Random) -> Drawn:
    # h5py takes the size of the dtype that the tag names, and may write over the end of its buffer for another one.
    tags = {b"NUMPY:>f4": 4, b"NUMPY:datetime64[ns]": 8, b"NUMPY:i2": 2, b"pixels": 0, b"": 0}
    tag = list(tags)[int(random.integers(len(tags)))]
    size = tags[tag] or int(random.integers(1, 21))
    kind = h5t.create(h5t.OPAQUE, size)
    kind.set_tag(tag)
    return Drawn(f"opaque of {size} bytes", kind, random_types._bits(random, size))


def _region(_: Random) -> Drawn:
    return Drawn("region", h5t.STD_REF_DSETREG.copy(), lambda count: np.zeros((count, 12), dtype=np.uint8))
