"""What a run costs with 2 to 48 ranks and how that grows: operations on shared files, bytes, memory, time; planning."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any

from benchmarks.growth.counting_filesystem import CONTENT, FOLDERS, METADATA, REFRESH
from benchmarks.growth.measure import BEGIN, END, Seen, build_counter, measure
from benchmarks.growth.planning import NUM_RANKS, Planned, measure as measure_plan, plans
from benchmarks.harness import Bench, NotHere, Part, Suite
from benchmarks.results_file import Record
from tests.faults.checkpoint.mounts import why_not

FIT_FROM = 8  # ranks: with fewer there is one node
MOST_EXPONENT = 0.1
MOST_BYTES_PER_RANK = 64.0
MOST_MB_PER_1000_RANKS = 1.0
MOST_PLANNING_MS = 10.0
MOST_PLANNING_MB = 8.0
# Checkpoints, metrics, and rank 0's check every few seconds whether a checkpoint is requested.
OWN_AREAS = ("run/checkpoints", "run/metrics", "run/save-now", FOLDERS)


def metadata(counts: Mapping[tuple[int, str, str], int], *, without: Iterable[str] = ()) -> int:
    """Returns the number of metadata operations, without those in the areas `without`."""
    return sum(n for (_, area, name), n in counts.items() if name in METADATA and area not in set(without))


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Returns b of the least-squares fit y = a x^b, in logarithms. 0 if all y are 0."""
    points = [(x, y) for x, y in points if y > 0]
    if len(points) < 2:
        return 0.0
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    return slope(list(zip(xs, ys, strict=True)))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Returns the slope of the least-squares line; 0 of a single point."""
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0


def growth_records(backend: str, seen: Sequence[Seen]) -> list[Record]:
    """Returns the records of one backend. seen: measurements by number of ranks, ascending."""
    fitted = [one for one in seen if one.num_ranks >= FIT_FROM] or list(seen)
    what = f"{backend}, {fitted[0].num_ranks} to {fitted[-1].num_ranks} ranks"
    name = f"growth.{backend}"
    bare_mb = slope([(one.num_ranks, one.bare / 1e6) for one in fitted]) * 1000
    per_node = {one.num_ranks: metadata(one.whole) / one.num_nodes for one in seen}

    def record(what_is: str, text: str, value: float, bar: float, unit: str, samples: Any) -> Record:
        return Record(
            id=f"{name}.{what_is}", what=f"{what}: {text}", value=value, bar=bar, sense="at most", unit=unit,
            samples=samples,
        )  # fmt: skip

    found = [
        record(
            "metadata",
            f"exponent of the metadata operations of a node in a whole run; by ranks: {_listed(per_node)}",
            exponent([(one.num_ranks, per_node[one.num_ranks]) for one in fitted]), MOST_EXPONENT, "",
            [_areas(one) for one in seen],
        ),
        record(
            "steady",
            "metadata operations per step between saves, without those of metrics and checkpoints; the largest of all "
            "numbers of ranks",
            max(metadata(one.steady, without=OWN_AREAS) for one in seen) / (END - BEGIN), 0, "operations",
            [_steady(one) for one in seen],
        ),
        record(
            "received",
            "bytes that a rank receives before its first step, for each further rank; by ranks: "
            + _listed({one.num_ranks: one.received for one in seen}),
            slope([(one.num_ranks, one.received) for one in fitted]), MOST_BYTES_PER_RANK, "bytes",
            {one.num_ranks: [one.received, one.calls] for one in seen},
        ),
        record(
            "memory",
            f"memory of a rank, MB (10^6 bytes) for 1,000 further ranks ({bare_mb:.1f} in ranks that only use MPI in "
            "the same way); MB by ranks: " + _listed({one.num_ranks: one.resident / 1e6 for one in seen}),
            slope([(one.num_ranks, one.resident / 1e6) for one in fitted]) * 1000, MOST_MB_PER_1000_RANKS, "MB",
            {one.num_ranks: [one.resident, one.bare] for one in seen},
        ),
        record(
            "memory.own",
            "that memory without that of ranks that only use MPI in the same way, MB for 1,000 further ranks",
            slope([(one.num_ranks, (one.resident - one.bare) / 1e6) for one in fitted]) * 1000, MOST_MB_PER_1000_RANKS,
            "MB", {one.num_ranks: one.resident - one.bare for one in seen},
        ),
        record(
            "start",
            "seconds from the command to the first step, by ranks: "
            + _listed({one.num_ranks: one.start_s for one in seen}) + "; the exponent (all ranks share 2 cores)",
            exponent([(one.num_ranks, one.start_s) for one in fitted]), 1.1, "",
            {one.num_ranks: one.start_s for one in seen},
        ),
    ]  # fmt: skip
    last = seen[-1]
    if last.hang:
        hang = last.hang
        what = f"{backend}: rank {hang['silent']} of {last.num_ranks} is stopped"
        for key, text in (
            ("named", f"seconds until it is named ({hang['lines']} lines, {hang['num_naming']} name it)"),
            ("gone", f"seconds until all ranks have gone (exit code {hang['code']}, the launcher gone after "
                     f"{hang['launcher_s']:.1f})"),
        ):  # fmt: skip
            found.append(record(f"hang.{key}", text, hang[f"{key}_s"], hang["limit_s"], "s", dict(hang)))
    return found


def planning_records(planned: Mapping[str, Planned]) -> list[Record]:
    found = []
    for name, plan in planned.items():
        key = name.replace(",", "").replace(" ", "-")
        for kind, unit, value, bar in (
            ("time", "ms", plan.seconds * 1e3, MOST_PLANNING_MS),
            ("memory", "MB", plan.num_bytes / 1e6, MOST_PLANNING_MB),
        ):
            found.append(
                Record(
                    id=f"growth.planning.{key}.{kind}", what=f"{name} for {NUM_RANKS:,} ranks, one rank's view: {unit}",
                    value=value, bar=bar, sense="at most", unit=unit,
                    samples={"seconds": plan.seconds, "bytes": plan.num_bytes},
                )
            )  # fmt: skip
    return found


def _areas(one: Seen) -> dict[str, Any]:
    """Returns the metadata operations by area, of all ranks and of rank 0."""
    found: dict[str, Any] = {"ranks": one.num_ranks, "nodes": one.num_nodes}
    for area in sorted({area for _, area, _ in one.whole}):
        here = {rank: 0 for rank, at, _ in one.whole if at == area}
        for (rank, at, name), number in one.whole.items():
            if at == area and name in METADATA:
                here[rank] += number
        found[area] = [sum(here.values()), here.get(0, 0)]
    return found


def _steady(one: Seen) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for (_, area, name), number in one.steady.items():
        if name in METADATA or (area == "data" and name in (*CONTENT, REFRESH)):
            counts[f"{area} {name}"] = counts.get(f"{area} {name}", 0) + number
    return {"ranks": one.num_ranks, **counts}


def _listed(values: Mapping[int, float]) -> str:
    return ", ".join(f"{ranks}: {value:,.0f}" for ranks, value in values.items())


# ---------------------------------------------------------------------- the suite

SIZES = (2, 4, 8, 16, 32, 48)
QUICK = (2, 4, 8)


def _planning(bench: Bench) -> list[Record]:
    return planning_records({name: measure_plan(plan) for name, plan in plans().items()})


def _growth(backend: str, bench: Bench) -> list[Record]:
    if (reason := why_not()) is not None:
        raise NotHere(reason)
    sizes, found = bench.options.ranks or bench.scale, []
    directory = bench.folder("growth", within=Path(tempfile.gettempdir()))
    library = build_counter(directory)
    for num_ranks in sizes:
        place = directory / f"{backend}-{num_ranks}"
        place.mkdir()
        hangs = num_ranks == max(sizes)
        seen = measure(num_ranks, backend=backend, directory=place, library=library, hangs=hangs)
        found.append(seen)
        started = f"started in {seen.start_s:.1f} s, {seen.received:,} bytes received"
        bench.say(f"{backend}, {num_ranks} ranks: {started}")
    return growth_records(backend, found)


def _options(parser: argparse.ArgumentParser) -> None:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--ranks", type=numbers, metavar="2,4,8", help="numbers of ranks")


SUITE = Suite(
    name="growth", about=__doc__,
    parts=(
        Part(figures=("planning",), title="planning", measure=_planning),
        *(
            Part(figures=(one,), title="the whole figure", measure=partial(_growth, one))
            for one in ("mpi", "horovod")
        ),
    ),
    full=SIZES, quick=QUICK, options=_options,
)  # fmt: skip
