"""Converts measurements to the records of growth and defines their bars. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.growth.counting_filesystem import CONTENT, FOLDERS, METADATA, REFRESH
from benchmarks.growth.measure import BEGIN, END, Seen
from benchmarks.growth.planning import NUM_RANKS, Planned
from benchmarks.results_file import Record

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
    """Returns the slope of the least-squares line."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def growth_records(backend: str, seen: Sequence[Seen]) -> list[Record]:
    """Returns the records of one backend. seen: measurements by number of ranks, ascending."""
    fitted = [one for one in seen if one.num_ranks >= FIT_FROM] or list(seen)
    what = f"{backend}, {fitted[0].num_ranks} to {fitted[-1].num_ranks} ranks"
    name = f"growth.{backend}"
    bare_mb = slope([(one.num_ranks, one.bare / 1e6) for one in fitted]) * 1000
    per_node = {one.num_ranks: metadata(one.whole) / one.num_nodes for one in seen}
    found = [
        Record(
            id=f"{name}.metadata",
            what=f"{what}: exponent of the metadata operations of a node in a whole run; by ranks: {_listed(per_node)}",
            value=exponent([(one.num_ranks, per_node[one.num_ranks]) for one in fitted]),
            bar=MOST_EXPONENT, sense="at most", unit="", samples=[_areas(one) for one in seen],
        ),
        Record(
            id=f"{name}.steady",
            what=f"{what}: metadata operations a step between saves, without those of metrics and checkpoints; the "
            "largest of all numbers of ranks",
            value=max(metadata(one.steady, without=OWN_AREAS) for one in seen) / (END - BEGIN),
            bar=0, sense="at most", unit="operations", samples=[_steady(one) for one in seen],
        ),
        Record(
            id=f"{name}.received",
            what=f"{what}: bytes that a rank receives before its first step, for each further rank; by ranks: "
            + _listed({one.num_ranks: one.received for one in seen}),
            value=slope([(one.num_ranks, one.received) for one in fitted]),
            bar=MOST_BYTES_PER_RANK, sense="at most", unit="bytes",
            samples={one.num_ranks: [one.received, one.calls] for one in seen},
        ),
        Record(
            id=f"{name}.memory",
            what=f"{what}: memory of a rank, MB (10^6 bytes) for 1,000 further ranks ({bare_mb:.1f} in ranks that only "
            "use MPI in the same way); MB by ranks: " + _listed({one.num_ranks: one.resident / 1e6 for one in seen}),
            value=slope([(one.num_ranks, one.resident / 1e6) for one in fitted]) * 1000,
            bar=MOST_MB_PER_1000_RANKS, sense="at most", unit="MB",
            samples={one.num_ranks: [one.resident, one.bare] for one in seen},
        ),
        Record(
            id=f"{name}.memory.own",
            what=f"{what}: that memory without that of ranks that only use MPI in the same way, MB for 1,000 further "
            "ranks",
            value=slope([(one.num_ranks, (one.resident - one.bare) / 1e6) for one in fitted]) * 1000,
            bar=MOST_MB_PER_1000_RANKS, sense="at most", unit="MB",
            samples={one.num_ranks: one.resident - one.bare for one in seen},
        ),
        Record(
            id=f"{name}.start",
            what=f"{what}: seconds from the command to the first step, by ranks: "
            + _listed({one.num_ranks: one.start_s for one in seen}) + "; the exponent (all ranks share 2 cores)",
            value=exponent([(one.num_ranks, one.start_s) for one in fitted]),
            bar=1.1, sense="at most", unit="", samples={one.num_ranks: one.start_s for one in seen},
        ),
    ]  # fmt: skip
    last = seen[-1]
    if last.hang:
        hang, stopped = last.hang, f"{backend}: rank {last.hang['silent']} of {last.num_ranks} is stopped"
        found += [
            Record(
                id=f"{name}.hang.named",
                what=f"{stopped}: seconds until it is named ({hang['lines']} lines, {hang['num_naming']} name it)",
                value=hang["named_s"], bar=hang["limit_s"], sense="at most", unit="s", samples=dict(hang),
            ),
            Record(
                id=f"{name}.hang.gone",
                what=f"{stopped}: seconds until all ranks have gone (exit code {hang['code']}, the launcher gone after "
                f"{hang['launcher_s']:.1f})",
                value=hang["gone_s"], bar=hang["limit_s"], sense="at most", unit="s", samples=dict(hang),
            ),
        ]  # fmt: skip
    return found


def planning_records(planned: Mapping[str, Planned]) -> list[Record]:
    found = []
    for name, plan in planned.items():
        key = name.replace(",", "").replace(" ", "-")
        what = f"{name} for {NUM_RANKS:,} ranks, one rank's view"
        samples = {"seconds": plan.seconds, "bytes": plan.num_bytes}
        found += [
            Record(
                id=f"growth.planning.{key}.time", what=f"{what}: ms", value=plan.seconds * 1e3, bar=MOST_PLANNING_MS,
                sense="at most", unit="ms", samples=samples,
            ),
            Record(
                id=f"growth.planning.{key}.memory", what=f"{what}: MB", value=plan.num_bytes / 1e6,
                bar=MOST_PLANNING_MB, sense="at most", unit="MB", samples=samples,
            ),
        ]  # fmt: skip
    return found


def _areas(one: Seen) -> dict[str, Any]:
    """Returns the metadata operations by area, of all ranks and of rank 0."""
    areas = sorted({area for _, area, _ in one.whole})
    return {
        "ranks": one.num_ranks,
        "nodes": one.num_nodes,
        **{
            area: [
                sum(n for (_, at, name), n in one.whole.items() if at == area and name in METADATA),
                sum(
                    n
                    for (rank, at, name), n in one.whole.items()
                    if at == area and name in METADATA and not rank
                ),
            ]
            for area in areas
        },
    }


def _steady(one: Seen) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for (_, area, name), number in one.steady.items():
        if name in METADATA or (area == "data" and name in (*CONTENT, REFRESH)):
            counts[f"{area} {name}"] = counts.get(f"{area} {name}", 0) + number
    return {"ranks": one.num_ranks, **counts}


def _listed(values: Mapping[int, float]) -> str:
    return ", ".join(f"{ranks}: {value:,.0f}" for ranks, value in values.items())
