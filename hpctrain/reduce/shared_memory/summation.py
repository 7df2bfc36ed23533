"""Sums arrays, and computes the sum of squares, in one pass over memory: compiled if available, otherwise in numpy.

torch would need one call per operation and cache-sized piece, which takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.floating[Any]]
Counts: TypeAlias = NDArray[np.int64]
Add: TypeAlias = Callable[[tuple[Array, ...], tuple[Array, ...], int, float], float]

# Interface version of `_add.c`; increase it here and there together.
VERSION = 2

# Elements that fit into a core's cache while they are summed: 256 KB of float32.
PIECE_ELEMS = 65536


def add_in_numpy(parts: tuple[Array, ...], into: tuple[Array, ...], num_squared: int, factor: float) -> float:
    """Adds up `parts` and writes the sum times `factor` into each array of `into`: the numpy version of `add`.

    Returns the sum of squares of the first `num_squared` elements of the result. The order of the additions is the same
    as in `add`; only the last bits of the sum of squares may differ.
    """
    square = 0.0
    with np.errstate(all="ignore"):  # the sum of squares shows values that are not finite
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
    """Functions of the compiled extension `_add.c`.

    add: adds up arrays; see the function `add`.
    fill: sets a rank's flag of a bucket to the number of pieces that the rank has filled.
    take: claims and sums the pieces of a bucket that all ranks have filled; see `NodeSum`.

    `fill` and `take` have no numpy version.
    """

    add: Add
    fill: Callable[[Counts, int], None]
    take: Callable[..., int]


def _compiled() -> Compiled | None:
    try:
        from hpctrain.reduce.shared_memory import _add as module
    except ImportError:
        return None
    # A stale build may have another interface: do not use it.
    if getattr(module, "VERSION", 0) != VERSION:
        return None
    return Compiled(module.add, module.fill, module.take)


COMPILED = _compiled()
_add: Add = COMPILED.add if COMPILED is not None else add_in_numpy


def add(parts: Sequence[Array], *, into: Sequence[Array], num_squared: int = 0, factor: float = 1.0) -> float:
    """Adds up `parts` in order, multiplies by `factor`, and writes the result into each array of `into`.

    Returns the sum of squares of the first `num_squared` elements of the result, in float64. This sum is not finite if
    one of these elements is not finite.

    parts: at least one contiguous array of shape (n,); all float32 or all float64.
    into: arrays of the same shape and dtype, which may be among `parts`.
    """
    return _add(tuple(parts), tuple(into), num_squared, factor)
