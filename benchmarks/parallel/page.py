"""Tables that are specific to docs/benchmarks/parallel.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results_page
from benchmarks.parallel.timed.methods import METHODS, OPTIMIZERS, Method


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Writes the tables of all figures, and machine and versions, into the page."""
    results_page.refresh(page, content, more=tables(content["records"]))


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns name of the table -> its lines."""
    found = {}
    of_plan = [record for record in records if record["id"].startswith("parallel.2.plan.")]
    if memory := [r for r in records if r["id"].startswith("parallel.2.") and r not in of_plan]:
        found["memory"] = _memory(memory)
    if of_plan:
        found["plan"] = _plan(of_plan)
    if times := [r for r in records if r["id"].startswith("parallel.4.") and r["id"].endswith(".best")]:
        found["times"] = _times(
            {_place(r): r["samples"] for r in times}, METHODS, peers=", on Gloo", ours=", ours"
        )
    if of_horovod := [r for r in records if r["id"].startswith("parallel.7.")]:
        places: dict[str, dict[str, Sequence[float]]] = {}
        for record in of_horovod:
            places.setdefault(_place(record), {}).update(record["samples"])
        found["optimizers"] = _times(places, OPTIMIZERS)
    return found


def _place(record: Mapping[str, Any]) -> str:
    """Returns `4x1.1gbit` for `parallel.4.4x1.1gbit.best`."""
    return ".".join(record["id"].split(".")[2:-1])


def _memory(records: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        "| layout and ranks | formula, MB | held by a rank, MB | peak in a step, MB |",
        "| --- | --- | --- | --- |",
    ]
    for record in records:
        samples = record["samples"]
        formula = samples["held_bytes"][0] / (1 + samples["off"][0])
        held, peak = (
            " to ".join(f"{size / 1e6:.0f}" for size in sorted({min(sizes), max(sizes)}))
            for sizes in (samples["held_bytes"], samples["peak_bytes"])
        )
        rows.append(f"| {record['id'].removeprefix('parallel.2.')} | {formula / 1e6:.0f} | {held} | {peak} |")
    return "\n".join(rows)


def _plan(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the growth from the small to the large model: planned, and of the rank that grew most."""
    rows = ["| way | planned, MB | measured, MB | off |", "| --- | --- | --- | --- |"]
    for record in records:
        measured, planned = record["samples"]["measured"], record["samples"]["planned"]
        grown, expected = (
            max(measured["large"]) - max(measured["small"]),
            planned["large"] - planned["small"],
        )
        rows.append(
            f"| {record['id'].removeprefix('parallel.2.plan.')} | {expected / 1e6:.0f} | {grown / 1e6:.0f} | "
            f"{expected / grown - 1:+.0%} |"
        )
    return "\n".join(rows)


def _times(
    places: Mapping[str, Mapping[str, Sequence[float]]],
    methods: Mapping[str, Method],
    *,
    peers: str = "",
    ours: str = "",
) -> str:
    """Returns milliseconds of a step by method, and a column for each place.

    places: place -> method -> seconds of each round. peers, ours: what is added to their names.
    """
    rows = [f"| ms, median of the rounds | {' | '.join(places)} |", f"| --- |{' --- |' * len(places)}"]
    for name, method in methods.items():
        cells = [
            f"{1e3 * median(seconds[name]):.0f}" if name in seconds else "" for seconds in places.values()
        ]
        if any(cells):
            rows.append(f"| {method.what}{ours if method.is_ours else peers} | {' | '.join(cells)} |")
    return "\n".join(rows)
