"""Sums of arrays in one pass over memory, with the squares of what comes out: compiled where it could be, else numpy.

torch needs a call for each step and each piece that fits into the cache: twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.floating[Any]]
Add: TypeAlias = Callable[[tuple[Array, ...], tuple[Array, ...], int], float]

# Values that a core keeps in its cache while it sums them: 256 KB of float32.
PIECE_ELEMS = 65536


def add_in_numpy(parts: tuple[Array, ...], into: tuple[Array, ...], num_squared: int) -> float:
    """What `add` does, in the same order; the squares' last bits may differ."""
    square = 0.0
    with np.errstate(all="ignore"):  # what is not finite is told by the square
        for begin in range(0, len(parts[0]), PIECE_ELEMS):
            piece = slice(begin, begin + PIECE_ELEMS)
            total = parts[0][piece] + parts[1][piece] if len(parts) > 1 else parts[0][piece]
            for other in parts[2:]:
                total += other[piece]
            counted = total[: max(0, num_squared - begin)].astype(np.float64)
            square += float(np.dot(counted, counted))
            for copy in into:
                copy[piece] = total
    return square


def _compiled() -> Add | None:
    try:
        from hpctrain.reduce._add import add
    except ImportError:
        return None
    return add


_chosen = _compiled()
IS_COMPILED = _chosen is not None
_add: Add = _chosen or add_in_numpy


def add(parts: Sequence[Array], *, into: Sequence[Array], num_squared: int = 0) -> float:
    """Each array of `into` becomes the sum of the parts, added in their order; others may be parts themselves.

    parts, into: shape (n,), contiguous, all of float32 or all of float64; at least one part. Returns the sum of the
    squares of the sum's first `num_squared` elements, in float64: not finite where one of these is not.
    """
    return _add(tuple(parts), tuple(into), num_squared)
