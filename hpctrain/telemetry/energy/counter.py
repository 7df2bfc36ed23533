"""What the energy counters have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, final


class EnergyCounter(Protocol):
    """An energy counter of this node.

    source: what counts. covers: whose energy it is.
    """

    source: str
    covers: str

    def read_j(self) -> float:
        """Returns the joules since the counter was opened. Raises OSError or ValueError if it cannot be read now."""
        ...

    def devices(self) -> Sequence[Mapping[str, float | int | None]]:
        """Returns what else is known of each device at this moment; empty for counters without devices."""
        ...


@final
class Increase:
    """Sums the increases of a counter since its first value, also when it begins again at 0.

    wraps_after: the largest value, after which 0 follows. None: the counter does not wrap; a smaller value than the one
    before then means that it was reset, and the increase until then is not known.
    """

    def __init__(self, first: int, *, wraps_after: int | None = None) -> None:
        self._last = first
        self._wraps_after = wraps_after
        self._total = 0

    def to(self, value: int) -> int:
        """Returns the increase from the first value to `value`, if the counter wraps at most once between calls."""
        step = value - self._last
        if step < 0:
            step = value if self._wraps_after is None else value + self._wraps_after - self._last
        self._last = value
        self._total += step
        return self._total
