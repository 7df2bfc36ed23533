"""Content of the files in `benchmarks/results/`, and merging a run's records into them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal

Sense = Literal["at most", "at least"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One number and its bar. `samples`: the raw measurements from which `value` is computed.

    rounds, range: of a figure that was measured in rounds, their number, and its least and greatest value; see
    `over_rounds`.
    """

    id: str
    what: str
    value: float
    bar: float
    sense: Sense
    unit: str
    samples: Any
    rounds: int = 0
    range: Sequence[float] = ()

    @property
    def holds(self) -> bool:
        return self.value <= self.bar if self.sense == "at most" else self.value >= self.bar

    def as_json(self) -> dict[str, Any]:
        """Returns the fields for JSON; `rounds` and `range` only of a figure that has them."""
        fields = asdict(self)
        if not self.range:
            del fields["rounds"], fields["range"]
        value = round(self.value, 4) if abs(self.value) >= 0.01 else float(f"{self.value:.4g}")
        return {**fields, "value": value, "holds": self.holds}


def over_rounds(
    numerators: Sequence[float], denominators: Sequence[float], *, same_rounds: bool = True
) -> dict[str, Any]:
    """Returns a record's fields `rounds` and `range` for a ratio of measurements.

    same_rounds: whether element r of both is from round r: then the range is from the least to the greatest ratio of a
    round, which encloses the median ratio with probability 1 - 2^(1 - rounds). Otherwise it is from the least numerator
    over the greatest denominator to the greatest over the least.
    """
    if same_rounds:
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        extremes = (min(ratios), max(ratios))
    else:
        extremes = (min(numerators) / max(denominators), max(numerators) / min(denominators))
    return {"rounds": len(numerators), "range": extremes}


def ratio_record(
    record_id: str, what: str, numerators: Sequence[float], denominators: Sequence[float], *, bar: float,
    unit: str, samples: Any, sense: Sense = "at least", of_medians: bool = False, same_rounds: bool = True,
) -> Record:  # fmt: skip
    """Returns the record of a ratio of measurements.

    of_medians: its value is the ratio of the medians, instead of the median of the rounds' ratios. same_rounds: see
    `over_rounds`.
    """
    if of_medians:
        value = median(numerators) / median(denominators)
    else:
        value = median(a / b for a, b in zip(numerators, denominators, strict=True))
    return Record(
        id=record_id, what=what, value=value, bar=bar, sense=sense, unit=unit, samples=samples,
        **over_rounds(numerators, denominators, same_rounds=same_rounds),
    )  # fmt: skip


def figure_of(record_id: str) -> str:
    """Returns the figure of a record: `reduction.2` for `reduction.2.200mbit.ours-16`, `data.1` for `data.1a`,
    `growth.mpi` for `growth.mpi.memory`."""
    return re.sub(r"(?<=\d)[a-z]+$", "", ".".join(record_id.split(".")[:2]))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of one run of a benchmark. Figures are named as by `figure_of`.

    failed: figure -> its parts that could not be measured. started: figure -> part -> how its ranks were started.
    """

    records: Sequence[Record] = ()
    failed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    started: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def attempted(self) -> set[str]:
        """Figures that this run measured or tried to measure; older records of them are removed."""
        return {*(figure_of(record.id) for record in self.records), *self.failed}

    def figures(self) -> dict[str, dict[str, Any]]:
        """Returns the file's entry `figures` for the attempted figures: failed parts and how ranks were started."""
        return {
            name: {
                **({"failed": list(self.failed[name])} if name in self.failed else {}),
                **({"started": dict(self.started[name])} if name in self.started else {}),
            }
            for name in sorted(self.attempted)
        }


def merged(old: dict[str, Any] | None, run: Run, *, about: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of the file after `run`.

    Figures that the run did not attempt are kept, marked with the commit at which they were measured. Of attempted
    figures all older records are removed, also if they failed; `figures` lists the failures.
    """
    before = old or {}

    def of_its_commit(entry: dict[str, Any]) -> dict[str, Any]:
        commit = entry.get("commit", before["commit"])
        return {**entry, "commit": commit} if commit != about["commit"] else entry

    records = [of_its_commit(r) for r in before.get("records", []) if figure_of(r["id"]) not in run.attempted]
    records += [record.as_json() for record in run.records]
    figures = {
        name: of_its_commit(entry)
        for name, entry in before.get("figures", {}).items()
        if name not in run.attempted
    }
    figures |= run.figures()
    return {
        **about,
        "figures": dict(sorted(figures.items())),
        "records": sorted(records, key=lambda record: figure_of(record["id"])),
    }


def write(path: Path, run: Run, *, about: dict[str, Any]) -> dict[str, Any]:
    """Merges a run into the file and returns the file's new content.

    about: from `about_this_run`, called before the run, so that a commit made during the run is not named.
    """
    old = json.loads(path.read_text()) if path.exists() else None
    content = merged(old, run, about=about)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(_compact(content))
    unfinished.replace(path)  # a run that is interrupted now keeps the old file
    written: dict[str, Any] = json.loads(
        path.read_text()
    )  # read back, so that the page shows the rounded values of the file
    return written


def _compact(content: dict[str, Any]) -> str:
    """Returns the JSON text, with each record's samples on one line, which keeps diffs short."""
    lines = json.dumps({**content, "records": []}, indent=1)
    blocks = [
        " {\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(_rounded(v))}" for k, v in record.items())
        + "\n }"
        for record in content["records"]
    ]
    return lines.replace('"records": []', '"records": [\n' + ",\n".join(blocks) + "\n ]") + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def about_this_run(repository: Path, *, benchmark: str) -> dict[str, Any]:
    """Returns machine, versions and commit.

    The commit gets the suffix `+changes` if hpctrain, the benchmark's folder or a module directly in benchmarks/
    has uncommitted changes. benchmark: name of the folder in benchmarks/; `*.py` for all of them.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    paths = ("hpctrain", f"benchmarks/{benchmark}", ":(glob)benchmarks/*.py")
    changed = git("status", "--porcelain", "--", *paths)
    return {
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            "kernel": platform.release(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "horovod", "mpi4py", "numpy")},
            "mpi": _mpi_version(),
        },
        "commit": git("rev-parse", "HEAD") + ("+changes" if changed else ""),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None  # Horovod is optional


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _mpi_version() -> str:
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else "unknown"
