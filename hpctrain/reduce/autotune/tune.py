"""Chooses the reduction algorithms of a run, from cached or new measurements.

The cache is a JSON file, `reduction.json` in the run directory, with one entry per key, so that a resumed run makes
the same choice. The key contains everything that the times and the candidates depend on. One rank reads and writes the
file.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World, broadcast_json, on_rank_0, probe_started_mpi
from hpctrain.errors import UsageError
from hpctrain.reduce.autotune.decision import (
    Choice,
    measurements_from_json,
    measurements_to_json,
)
from hpctrain.reduce.autotune.link_speed import (
    Candidate,
    LinkFloor,
    LinkSpeed,
    Measurement,
    levels_from_json,
    levels_to_json,
    measure_levels,
)
from hpctrain.reduce.autotune.trials import MakeReducer, calibrate
from hpctrain.reduce.wire_formats import roundings
from hpctrain.telemetry import write_json
from hpctrain.topology import Topology
from hpctrain.version import __version__

CALIBRATION_FILE = "reduction.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationKey:
    """The conditions of a calibration, which measures the candidate reductions.

    Measurements are used again only under the same conditions.

    versions: versions of the libraries that a reduction uses, by name.
    """

    ranks_by_node: tuple[tuple[int, ...], ...]
    emulated: bool
    backend: str
    device: str
    candidates: tuple[Candidate, ...]
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls,
        *,
        topology: Topology,
        backend: str,
        device: str,
        candidates: tuple[Candidate, ...],
        versions: dict[str, str],
    ) -> CalibrationKey:
        return cls(
            ranks_by_node=topology.ranks_by_node, emulated=topology.emulated, backend=backend, device=device,
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
class StoredCalibration:
    """Results of one calibration (measurements of the candidate reductions), convertible to and from JSON.

    measurements: times of the candidates.
    levels: measured speeds of the links.
    seconds: duration of the calibration.
    """

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
    def from_json(cls, value: Any) -> StoredCalibration:
        """Returns the results from their JSON form, a result of `as_json`. Raises ValueError for anything else."""
        if not isinstance(value, dict) or not {"measurements", "levels", "seconds"} <= value.keys():
            raise ValueError("not a calibration: fields are missing")
        return cls(
            measurements=tuple(measurements_from_json(value["measurements"])),
            levels=levels_from_json(value["levels"]),
            seconds=float(value["seconds"]),
        )


@dataclass(frozen=True, slots=True)
class CachedTrials:
    """Result of `read_calibration`.

    kept: the measurements for the key; None if the file has no measurements for this key.
    why: the reason why the file has no measurements for the key; "" if there is no file, or the file has no entries.
    """

    kept: StoredCalibration | None
    why: str = ""


def read_calibration(path: Path, *, key: CalibrationKey) -> CachedTrials:
    """Reads the measurements for `key` from the cache file `path`. A missing or damaged file is not an error."""
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
            kept = StoredCalibration.from_json(entry["found"])
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


def write_calibration(path: Path, *, key: CalibrationKey, kept: StoredCalibration) -> None:
    """Adds or replaces the entry for `key`, and keeps the other entries. The file is replaced atomically.

    May raise OSError.
    """
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


# Chooses the reduction algorithms of a run, from cached or new measurements.


PACKAGES = ("torch", "mpi4py", "horovod")
# Time for the trials. With the link measurements and trials that exceed their prediction, the total is below 2 s.
BUDGET_S = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFiles:
    """The files in which measurements of reductions are kept.

    run: file of this run, which is read before `shared`, so that a resumed run makes the same choice; None: no file.
    shared: file that several runs use (`reduction.calibration` of the recipe); None: no file.
    """

    run: Path | None = None
    shared: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.run, self.shared) if path is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoChoice:
    """The algorithm, wire format and bucket size that `auto` has chosen for a model; the same on every rank.

    measured: the candidates with this wire format, and their measurements.
    source: where the measurements come from, as text.
    levels: measured speeds of the links.
    seconds: duration of the calibration.
    """

    candidate: Candidate
    measured: Choice
    bucket_bytes: int
    source: str
    levels: tuple[LinkSpeed, ...] = ()
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """Returns the choice and its measurements as JSON values, for the run's record."""
        return {
            "source": self.source, "calibration_s": self.seconds, **self.candidate._asdict(),
            "bucket_bytes": self.bucket_bytes, "levels": levels_to_json(self.levels), **self.measured.record(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResults:
    """Measurements from which `auto` chooses once it knows the size of the model; the same on every rank.

    choice: the candidates and their measurements.
    source: where the measurements come from, as text.
    levels: measured speeds of the links.
    seconds: duration of the calibration.
    """

    choice: Choice
    source: str
    levels: tuple[LinkSpeed, ...] = ()
    seconds: float = 0.0

    def choose(
        self, *, gradient_bytes: int, bucket_bytes: int | None = None, overlap: bool = True
    ) -> AutoChoice:
        """Chooses wire format, bucket size and algorithm for a model with `gradient_bytes` of gradients. Pure.

        bucket_bytes: bucket size from the recipe; None: the bucket size is chosen too.
        overlap: True if reductions overlap with backward.
        """
        chosen = self.choice.bucket_bytes(gradient_bytes=gradient_bytes, overlap=overlap)
        wire = self.choice.fastest_wire(bucket_sizes(gradient_bytes, bucket_bytes=bucket_bytes or chosen))
        choice = self.choice.for_wire(wire)
        size = bucket_bytes or choice.bucket_bytes(gradient_bytes=gradient_bytes, overlap=overlap)
        return AutoChoice(
            candidate=choice.fastest(bucket_sizes(gradient_bytes, bucket_bytes=size)), measured=choice,
            bucket_bytes=size, source=self.source, levels=self.levels, seconds=self.seconds,
        )  # fmt: skip


def bucket_sizes(gradient_bytes: int, *, bucket_bytes: int) -> list[int]:
    """Returns the size of each bucket that gradients of `gradient_bytes` would fill, at least one, for a prediction."""
    full, rest = divmod(gradient_bytes, bucket_bytes)
    return [bucket_bytes] * full + ([rest] if rest or not full else [])


def reduction_versions(backend: str) -> dict[str, str]:
    """Returns the versions of the libraries that a reduction over `backend` uses. Not collective."""
    versions = {"hpctrain": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if backend in ("mpi", "horovod"):
        facts = probe_started_mpi()
        if "library" in facts:
            versions["mpi"] = facts["library"]
    return versions


@dataclass(slots=True)
class _Looked:
    """Contents of the cache files as rank 0 has read them, as JSON values for the other ranks."""

    kept: dict[str, Any] | None = None
    source: str = ""
    notes: list[str] = field(default_factory=list)


def find_choice(
    world: World,
    *,
    make: MakeReducer,
    candidates: Sequence[Candidate],
    topology: Topology,
    device: torch.device,
    files: CalibrationFiles | None = None,
    versions: Mapping[str, str] | None = None,
    note: Callable[[str], None] = lambda text: None,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> TrialResults:
    """Reads cached measurements, or measures and caches them. Collective; the result is the same on every rank.

    With one rank or one candidate, nothing is measured.

    make: function that creates the reducer of a candidate; collective.
    candidates: the candidates, the same in the same order on every rank.
    files: files from which measurements are read and to which new measurements are written; None: no files.
    versions: versions of the libraries by name; None: they are determined here.
    note: called on every rank with a message about anything that could not be read, written or measured.
    budget_s: time for the measurements, in seconds.

    Raises UsageError if `candidates` is empty.
    """
    if not candidates:
        raise UsageError("there are no reduction candidates to choose from: give at least one", agreed=True)
    if world.num_ranks == 1 or len(candidates) == 1:
        why = "one rank" if world.num_ranks == 1 else "no other algorithm is available"
        exact = min(candidates, key=lambda candidate: roundings(candidate.wire))
        return TrialResults(choice=Choice.only(exact), source=f"not measured: {why}")
    files = files or CalibrationFiles()
    key = CalibrationKey.of(
        topology=topology, backend=world.reduction_backend, device=device.type,
        candidates=tuple(candidates),
        versions=dict(versions if versions is not None else reduction_versions(world.reduction_backend)),
    )  # fmt: skip
    looked = _look(world, files, key=key)
    for text in looked.notes:
        note(text)
    if looked.kept is not None:
        kept, source = StoredCalibration.from_json(looked.kept), looked.source
    else:
        kept, notes = _measure(
            world, make=make, candidates=candidates, topology=topology, device=device,
            budget_s=budget_s, clock=clock,
        )  # fmt: skip
        for text in notes:
            note(f"reduction: {text}")
        source = f"measured in {kept.seconds:.1f} s"
        for text in _write(world, files.paths, key=key, kept=kept):
            note(text)
    return TrialResults(
        choice=Choice.of_measurements(kept.measurements, floor=LinkFloor.of(topology, kept.levels)),
        source=source, levels=kept.levels,
        seconds=kept.seconds,
    )  # fmt: skip


def _look(world: World, files: CalibrationFiles, *, key: CalibrationKey) -> _Looked:
    """Looks for measurements for `key` in the files, on rank 0, first in the run's file. Collective.

    Measurements that are only in the shared file are copied to the run's file.
    """

    def look() -> dict[str, Any]:
        notes: list[str] = []
        for path in files.paths:
            found = read_calibration(path, key=key)
            if found.kept is not None:
                if path != files.run and files.run is not None:
                    notes += _try_to_write([files.run], key=key, kept=found.kept)
                return {"kept": found.kept.as_json(), "source": f"from {path}", "notes": notes}
            if found.why:
                notes.append(
                    f"reduction: {found.why}: the reductions are measured again unless another file has them"
                )
            elif path == files.shared:
                notes.append(f"reduction: {path} holds no measurements for this run: they are added to it")
        return {"kept": None, "source": "", "notes": notes}

    return _Looked(**on_rank_0(world, look))


def _measure(
    world: World,
    *,
    make: MakeReducer,
    candidates: Sequence[Candidate],
    topology: Topology,
    device: torch.device,
    budget_s: float,
    clock: Callable[[], float],
) -> tuple[StoredCalibration, list[str]]:
    began = clock()
    levels = measure_levels(world, topology, device=device, clock=clock)
    levels_s = clock() - began
    found = calibrate(
        world, make=make, candidates=candidates, device=device, floor=LinkFloor.of(topology, levels),
        budget_s=budget_s, clock=clock,
    )  # fmt: skip
    seconds = levels_s + found.seconds
    kept = StoredCalibration(measurements=found.measurements, levels=levels, seconds=seconds)
    # Through JSON, as if read from a file, so that this run and one that reads the file make the same choice.
    mine = {"kept": kept.as_json(), "notes": list(found.notes)}
    of_rank_0 = broadcast_json(world, mine)
    return StoredCalibration.from_json(of_rank_0["kept"]), of_rank_0["notes"]


def _write(world: World, paths: Sequence[Path], *, key: CalibrationKey, kept: StoredCalibration) -> list[str]:
    texts: list[str] = on_rank_0(world, lambda: _try_to_write(paths, key=key, kept=kept))
    return texts


def _try_to_write(paths: Sequence[Path], *, key: CalibrationKey, kept: StoredCalibration) -> list[str]:
    """Writes the measurements to the files. Returns a note for the user for each file that cannot be written."""
    notes = []
    for path in paths:
        try:
            write_calibration(path, key=key, kept=kept)
        except OSError as error:
            notes.append(
                f"reduction: the measurements cannot be written to {path} ({error.strerror}): a resumed run measures "
                "again, and may choose another algorithm, whose sums differ in the last bits"
            )
    return notes
