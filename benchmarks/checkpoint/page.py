"""Tables that are specific to docs/benchmarks/checkpoint.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results_page

# Id of a record whose samples are the seconds of all methods -> name of its table, bytes of the state.
TABLES = {
    "checkpoint.1a": ("saves.512mib", 512 << 20), "checkpoint.1d": ("saves.small", 10_000 * 4096),
    "checkpoint.1d.beside": ("saves.small-beside", 10_000 * 4096),
    "checkpoint.1.1-rank": ("saves.1-rank", 512 << 20), "checkpoint.1.4-ranks": ("saves.4-ranks", 512 << 20),
    "checkpoint.1.2gib": ("saves.2gib", 2 << 30), "checkpoint.2a": ("loads.warm", 512 << 20),
    "checkpoint.2b": ("loads.cold", 512 << 20), "checkpoint.2c": ("loads.peers", 512 << 20),
    "checkpoint.4a": ("saves.replicas", 512 << 20),
}  # fmt: skip


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Writes the tables of all figures, and machine and versions, into the page."""
    results_page.refresh(page, content, more=tables(content["records"]))


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns name of the table -> its lines."""
    found = {}
    for record in records:
        if record["id"] in TABLES:
            name, num_bytes = TABLES[record["id"]]
            found[name] = times(record["samples"]["seconds"], num_bytes=num_bytes)
        elif record["id"] == "checkpoint.3a":
            found["stalls"] = stalls(record["samples"])
        elif record["id"] == "checkpoint.3b":
            found["memory"] = memory(record["samples"]["bytes"])
        elif record["id"] == "checkpoint.3c":
            found["steps"] = steps(record["samples"]["seconds"])
    return found


def stalls(samples: Mapping[str, Any]) -> str:
    rows = [
        "| | training blocked, ms, median | least | most | until it is saved, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    copies = samples["seconds"]["memcpy"]
    rows.append(f"| memcpy of a rank's share | {_three(copies)} | |")
    for name, found in samples["stalls"].items():
        rows.append(f"| {name} | {_three(found)} | {1e3 * median(samples['seconds'][name]):,.0f} |")
    return "\n".join(rows)


def memory(ranks_by_method: Mapping[str, Sequence[Mapping[str, int]]]) -> str:
    rows = ["| | a rank's share, MB | above the process before, MB, by rank |", "| --- | --- | --- |"]
    for name, ranks in ranks_by_method.items():
        above = ", ".join(f"{(rank['peak'] - rank['idle']) / 1e6:,.0f}" for rank in ranks)
        rows.append(f"| {name} | {ranks[0]['share'] / 1e6:,.0f} | {above} |")
    return "\n".join(rows)


def steps(rounds_by_method: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = [
        "| | step alone, ms | step during a save, ms | slower | until it is saved, ms | added by a save, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, rounds in rounds_by_method.items():
        quiet = [sum(one["quiet"]) / len(one["quiet"]) for one in rounds]
        during = [sum(one["beside"]) / len(one["beside"]) for one in rounds]
        slower = median(b / q - 1 for b, q in zip(during, quiet, strict=True))
        added = median(
            sum(one["beside"]) - q * len(one["beside"]) for one, q in zip(rounds, quiet, strict=True)
        )
        rows.append(
            f"| {name} | {1e3 * median(quiet):.1f} | {1e3 * median(during):.1f} | {slower:.0%} "
            f"| {1e3 * median(one['save'] for one in rounds):,.0f} | {1e3 * added:,.0f} |"
        )
    return "\n".join(rows)


def _three(seconds: Sequence[float]) -> str:
    return " | ".join(f"{1e3 * value:,.1f}" for value in (median(seconds), min(seconds), max(seconds)))


def times(seconds: Mapping[str, Sequence[float]], *, num_bytes: int) -> str:
    rows = [
        "| | ms, median | fastest round | slowest round | MB/s, median |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in sorted(seconds, key=lambda name: median(seconds[name])):
        found = [1e3 * value for value in seconds[name]]
        rate = num_bytes / median(seconds[name]) / 1e6
        rows.append(
            f"| {name} | {median(found):,.0f} | {min(found):,.0f} | {max(found):,.0f} | {rate:,.0f} |"
        )
    return "\n".join(rows)
