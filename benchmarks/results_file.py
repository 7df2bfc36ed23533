"""What the files of `benchmarks/results/` hold, and how they are put together."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Record:
    """One number against its bar. `samples`: the raw measurements that it comes from."""

    id: str
    what: str
    value: float
    bar: float
    sense: Literal["at most", "at least"]
    unit: str
    samples: Any

    @property
    def holds(self) -> bool:
        return self.value <= self.bar if self.sense == "at most" else self.value >= self.bar

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "value": round(self.value, 4), "holds": self.holds}


def figure_of(record_id: str) -> str:
    """`reduction.2` of `reduction.2.200mbit.ours-16`, `data.1` of `data.1a`."""
    return ".".join(record_id.split(".")[:2]).rstrip(ascii_lowercase)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of a benchmark gave. Figures are named as by `figure_of`.

    failed: figure -> what of it could not be measured. started: figure -> part of it -> how its ranks were started.
    """

    records: Sequence[Record] = ()
    failed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    started: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def attempted(self) -> set[str]:
        """Figures of which nothing older may stay."""
        return {*(figure_of(record.id) for record in self.records), *self.failed}

    def figures(self) -> dict[str, dict[str, Any]]:
        """What the file says about the attempted figures besides their records."""
        return {
            name: {
                **({"failed": list(self.failed[name])} if name in self.failed else {}),
                **({"started": dict(self.started[name])} if name in self.started else {}),
            }
            for name in sorted(self.attempted)
        }


def merged(old: dict[str, Any] | None, run: Run, *, about: dict[str, Any]) -> dict[str, Any]:
    """The file after a run of some figures.

    Figures that the run did not attempt stay, marked with the commit they are of. Of the others nothing older stays,
    also where they failed: `figures` says so.
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
    """Put a run's figures into the file; returns what the file holds afterwards.

    about: see `about_this_run`, called before the run: a commit made meanwhile is not what was measured.
    """
    old = json.loads(path.read_text()) if path.exists() else None
    content = merged(old, run, about=about)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact(content))
    written: dict[str, Any] = json.loads(
        path.read_text()
    )  # rounded, as who makes the page from the file finds it
    return written


def _compact(content: dict[str, Any]) -> str:
    """A record a block, its samples on one line: readable, and small enough to look at a diff."""
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
    """Machine, versions, commit.

    The commit is marked where hpctrain, the benchmark or what all benchmarks share differs from it; `benchmark` is the
    folder's name in benchmarks/.
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
            **{name: version(name) for name in ("torch", "horovod", "mpi4py", "numpy")},
            "mpi": _mpi_version(),
        },
        "commit": git("rev-parse", "HEAD") + ("+changes" if changed else ""),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _mpi_version() -> str:
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else "unknown"
