"""Trees of files as the kernel shows energy counters under /sys."""

from __future__ import annotations

from pathlib import Path

from hpctrain.storage import replace_file

RANGE_UJ = 262_143_328_850  # of a package of an Intel Xeon


def write_rapl(root: Path, zones: dict[str, tuple[str, int, int]]) -> None:
    """zones: by name, such as `intel-rapl:0:1`, the zone's own name, its energy and its range, both µJ."""
    classes = root / "sys/class/powercap"
    classes.mkdir(parents=True)
    for zone, (name, energy, largest) in zones.items():
        # A zone of a package lies in the package's folder; the class has a link to each.
        *parents, _ = ["intel-rapl", *(zone[: len("intel-rapl:0")],) * (zone.count(":") == 2), zone]
        folder = (root / "sys/devices/virtual/powercap").joinpath(*parents, zone)
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in (
            ("name", name),
            ("energy_uj", energy),
            ("max_energy_range_uj", largest),
            ("enabled", 1),
        ):
            (folder / file).write_text(f"{text}\n")
        (classes / zone).symlink_to(folder)
    (classes / "intel-rapl").mkdir()


def set_rapl(root: Path, zone: str, energy: int) -> None:
    _replace(root / "sys/class/powercap" / zone / "energy_uj", f"{energy}\n")


def set_cray(root: Path, joules: int, *, unit: str = "J") -> None:
    folder = root / "sys/cray/pm_counters"
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "energy", f"{joules} {unit} 1398360352187765 us\n")


def _replace(path: Path, text: str) -> None:
    """At once, as the kernel shows a number: a reader never sees half of it."""
    replace_file(path, text.encode(), partial=path.with_name(f".{path.name}.partial"))


def xeon(root: Path) -> None:
    """Two packages and the memory of the first."""
    write_rapl(root, {
        "intel-rapl:0": ("package-0", RANGE_UJ - 1_000_000, RANGE_UJ),
        "intel-rapl:0:0": ("core", 5_000_000, RANGE_UJ),
        "intel-rapl:0:1": ("dram", 2_000_000, 65_712_999_613),
        "intel-rapl:1": ("package-1", 7_000_000, RANGE_UJ),
        "intel-rapl:2": ("psys", 9_000_000, RANGE_UJ),
    })  # fmt: skip
