"""What the files of `benchmarks/results/` hold, and how they are put together."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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


def merged(
    old: dict[str, Any] | None, new: Sequence[dict[str, Any]], *, about: dict[str, Any]
) -> dict[str, Any]:
    """The file after a run of some figures: other figures' records stay, marked with the commit they are of."""
    figures = {figure_of(record["id"]) for record in new}
    kept = []
    for record in (old or {}).get("records", []):
        if figure_of(record["id"]) not in figures:
            commit = record.get("commit", (old or {})["commit"])
            kept.append({**record, "commit": commit} if commit != about["commit"] else record)
    records = sorted([*kept, *new], key=lambda record: figure_of(record["id"]))
    return {**about, "records": records}


def write(
    path: Path,
    records: Sequence[Record],
    *,
    repository: Path,
    benchmark: str,
    versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Put the records into the file; what it holds afterwards.

    benchmark: the folder of benchmarks/ that they come from: a commit is marked where that, or hpctrain,
    differs from it. versions: of what was measured beside the usual.
    """
    old = json.loads(path.read_text()) if path.exists() else None
    about = about_this_run(repository, benchmark=benchmark)
    about["versions"] |= versions or {}
    content = merged(old, [record.as_json() for record in records], about=about)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact(content))
    return content


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
    """Machine, versions, commit."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    paths = ("hpctrain", f"benchmarks/{benchmark}")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *paths)
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
