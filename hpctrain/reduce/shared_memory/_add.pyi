import numpy as np
from numpy.typing import NDArray

from hpctrain.reduce.shared_memory.summation import Array, Counts

VERSION: int

def add(parts: tuple[Array, ...], into: tuple[Array, ...], num_squared: int, factor: float) -> float: ...
def fill(flags: Counts, count: int) -> None: ...
def take(
    parts: tuple[Array, ...],
    flags: tuple[Counts, ...],
    claimed: Counts,
    squares: NDArray[np.float64],
    local: int,
    before: int,
    piece_elems: int,
    num_squared: int,
    factor: float,
) -> int: ...
