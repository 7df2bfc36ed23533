"""Energy of processors and memory, as RAPL counts it and Linux shows it (Documentation/power/powercap/powercap.rst)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from hpctrain.telemetry.energy.counter import Increase

_FOLDER = "sys/class/powercap"


@final
class RaplCounter:
    """The sum of `energy_uj` of the zones `package-N` and `dram` in `/sys/class/powercap/intel-rapl:*`, also on AMD.

    Other zones are parts of packages (`core`, `uncore`) or contain them (`psys`). A zone begins again at 0 after
    `max_energy_range_uj`, for a processor of 250 W every 17 minutes.

    root: directory with `sys`. Raises OSError or ValueError if a zone cannot be read (since Linux 5.10 only root may,
    unless the site allows it), or there is none.
    """

    source = "RAPL"
    covers = "processors and memory"

    def __init__(self, root: Path = Path("/")) -> None:
        self._zones = []
        for folder in sorted((root / _FOLDER).glob("intel-rapl:*")):
            name = (folder / "name").read_text(encoding="ascii").strip()
            if name.startswith("package") or name == "dram":
                path = folder / "energy_uj"
                largest = _number(folder / "max_energy_range_uj")
                self._zones.append((path, Increase(_number(path), wraps_after=largest)))
        if not self._zones:
            raise FileNotFoundError(f"no zone of RAPL in {root / _FOLDER}")

    def read_j(self) -> float:
        return sum(increase.to(_number(path)) for path, increase in self._zones) / 1e6

    def devices(self) -> Sequence[Mapping[str, float | int | None]]:
        return ()


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
