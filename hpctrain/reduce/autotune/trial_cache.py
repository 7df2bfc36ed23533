"""Cache file of measurements, so that a resumed run makes the same choice, and other runs need not measure.

JSON, `reduction.json` in the run directory: one entry per key. The key contains everything that the times and the
candidates depend on. Read and written by one rank.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.reduce.autotune.cost_model import Candidate, Measurement
from hpctrain.reduce.autotune.decision import measurements_from_json, measurements_to_json
from hpctrain.reduce.autotune.link_speed import LinkSpeed, levels_from_json, levels_to_json
from hpctrain.telemetry import write_json
from hpctrain.topology import Topology

CALIBRATION_FILE = "reduction.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationKey:
    """Conditions under which measurements are valid. load: `computation` if the ranks computed during the trials, else
    `none`. versions: of the libraries that a reduction uses, by name."""

    ranks_by_node: tuple[tuple[int, ...], ...]
    emulated: bool
    backend: str
    device: str
    load: str
    candidates: tuple[Candidate, ...]
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls,
        *,
        topology: Topology,
        backend: str,
        device: str,
        under_load: bool,
        candidates: tuple[Candidate, ...],
        versions: dict[str, str],
    ) -> CalibrationKey:
        return cls(
            ranks_by_node=topology.ranks_by_node, emulated=topology.emulated, backend=backend, device=device,
            load="computation" if under_load else "none",
            candidates=candidates, versions=tuple(sorted(versions.items())),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ranks_by_node": [list(ranks) for ranks in self.ranks_by_node],
            "candidates": [list(candidate) for candidate in self.candidates],
            "versions": dict(self.versions),
        }

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Returns the names of the fields in which `other`, a key from a file, differs from this key."""
        mine = self.as_json()
        return sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Results of one calibration, convertible to and from JSON. seconds: its duration."""

    measurements: tuple[Measurement, ...]
    levels: tuple[LinkSpeed, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "measurements": measurements_to_json(self.measurements),
            "levels": levels_to_json(self.levels),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, value: Any) -> Kept:
        """Inverse of `as_json`. Raises ValueError for anything else."""
        if not isinstance(value, dict) or not {"measurements", "levels", "seconds"} <= value.keys():
            raise ValueError("not a calibration: fields are missing")
        return cls(
            measurements=tuple(measurements_from_json(value["measurements"])),
            levels=levels_from_json(value["levels"]),
            seconds=float(value["seconds"]),
        )


@dataclass(frozen=True, slots=True)
class CachedTrials:
    """An entry of a file, or None and the reason; the reason is empty if there is no file or no entry."""

    kept: Kept | None
    why: str = ""


def read_calibration(path: Path, *, key: CalibrationKey) -> CachedTrials:
    """Reads the measurements of `key` from `path`. A missing or damaged file is not an error: see `CachedTrials`."""
    try:
        entries = _entries(path)
    except FileNotFoundError:
        return CachedTrials(None)
    except (OSError, ValueError) as error:
        return CachedTrials(None, f"{path} cannot be read ({error})")
    others: list[str] = []
    for entry in entries:
        differences = key.differences(entry["key"])
        if differences:
            others = differences if not others else min(others, differences, key=len)
            continue
        try:
            kept = Kept.from_json(entry["found"])
            unknown = {m.candidate for m in kept.measurements} - set(key.candidates)
            if unknown:
                raise ValueError(
                    f"an entry has measurements of {unknown}, which are not in its list of candidates"
                )
            return CachedTrials(kept)
        except (ValueError, TypeError) as error:
            return CachedTrials(None, f"{path} cannot be read ({error})")
    return CachedTrials(
        None, f"{path} holds measurements of other {', '.join(others).replace('_', ' ')}" if others else ""
    )


def write_calibration(path: Path, *, key: CalibrationKey, kept: Kept) -> None:
    """Adds or replaces the entry of `key`, keeping other entries; replaces the file atomically. May raise OSError."""
    try:
        entries = _entries(path)
    except (OSError, ValueError):
        entries = []  # missing or damaged
    entries = [entry for entry in entries if key.differences(entry["key"])]
    entries.append({"key": key.as_json(), "found": kept.as_json()})
    write_json(path, {"schema": SCHEMA, "entries": entries})


def _entries(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a file. Raises OSError or ValueError if it is not a valid cache file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"it is not of schema {SCHEMA}")
    entries = content.get("entries")
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and isinstance(e.get("key"), dict) and "found" in e for e in entries
    ):
        raise ValueError("its entries are damaged")
    return entries
