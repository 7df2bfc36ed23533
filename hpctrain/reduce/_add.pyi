from hpctrain.reduce.add import Array
from hpctrain.reduce.node_memory import Counts
from hpctrain.reduce.reducer import Numbers

def add(parts: tuple[Array, ...], into: tuple[Array, ...], num_squared: int) -> float: ...
def take(
    parts: tuple[Array, ...],
    flags: tuple[Counts, ...],
    claimed: Counts,
    squares: Numbers,
    local: int,
    before: int,
    piece_elems: int,
    num_squared: int,
) -> int: ...
