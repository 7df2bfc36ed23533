"""Sums of arrays in one pass over memory, with the squares of what comes out: compiled where it could be, else numpy.

torch needs a call for each step and each piece that fits into the cache: twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.floating[Any]]
Counts: TypeAlias = NDArray[np.int64]
Add: TypeAlias = Callable[[tuple[Array, ...], tuple[Array, ...], int, float], float]

# Of what `_add.c` has and how it is called: raise both together.
VERSION = 2

# Values that a core keeps in its cache while it sums them: 256 KB of float32.
PIECE_ELEMS = 65536


def add_in_numpy(parts: tuple[Array, ...], into: tuple[Array, ...], num_squared: int, factor: float) -> float:
    """What `add` does, in the same order; the squares' last bits may differ."""
    square = 0.0
    with np.errstate(all="ignore"):  # what is not finite is told by the square
        for begin in range(0, len(parts[0]), PIECE_ELEMS):
            piece = slice(begin, begin + PIECE_ELEMS)
            total = parts[0][piece] + parts[1][piece] if len(parts) > 1 else parts[0][piece]
            for other in parts[2:]:
                total += other[piece]
            if factor != 1:
                total = total * total.dtype.type(factor)
            counted = total[: max(0, num_squared - begin)].astype(np.float64)
            square += float(np.dot(counted, counted))
            for copy in into:
                copy[piece] = total
    return square


@dataclass(frozen=True, slots=True)
class Compiled:
    """What `_add.c` has. fill, take: see `work_shared_sum.py`; numpy has nothing like them."""

    add: Add
    fill: Callable[[Counts, int], None]
    take: Callable[..., int]


def _compiled() -> Compiled | None:
    try:
        from hpctrain.reduce.shared_memory import _add as module
    except ImportError:
        return None
    # What an old checkout has left behind may be called in another way: better slow than wrong.
    if getattr(module, "VERSION", 0) != VERSION:
        return None
    return Compiled(module.add, module.fill, module.take)


COMPILED = _compiled()
_add: Add = COMPILED.add if COMPILED is not None else add_in_numpy


def in_order(values: Iterable[float]) -> float:
    """Their sum, the same bits on every rank: Python's `sum` adds in other ways from version to version."""
    total = 0.0
    for value in values:
        total += value
    return total


def add(parts: Sequence[Array], *, into: Sequence[Array], num_squared: int = 0, factor: float = 1.0) -> float:
    """Each array of `into` becomes the sum of the parts, added in their order, times `factor`; others may be parts.

    parts, into: shape (n,), contiguous, all of float32 or all of float64; at least one part. Returns the sum of the
    squares of the first `num_squared` elements of the result, in float64: not finite where one of these is not.
    """
    return _add(tuple(parts), tuple(into), num_squared, factor)
