"""Energy of a node of HPE Cray, as its controller counts it.

Source of the format: HPE, "User Access to Compute Node Power Data": a value, its unit, and the time of the reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from hpctrain.telemetry.energy.counter import Increase

_FILE = "sys/cray/pm_counters/energy"


@final
class CrayCounter:
    """`/sys/cray/pm_counters/energy`, such as `5461213 J 1398360352187765 us`, updated ten times a second.

    root: directory with `sys`. Raises OSError or ValueError if it cannot be read.
    """

    source = "Cray pm_counters"
    covers = "the whole node"

    def __init__(self, root: Path = Path("/")) -> None:
        self._path = root / _FILE
        self._increase = Increase(self._read())

    def read_j(self) -> float:
        return float(self._increase.to(self._read()))

    def devices(self) -> Sequence[Mapping[str, float | int | None]]:
        return ()

    def _read(self) -> int:
        words = self._path.read_text(encoding="ascii").split()
        if len(words) < 2 or words[1] != "J":
            raise ValueError(f"{self._path} holds {' '.join(words)!r}, which is no energy in J")
        return int(words[0])
