"""Predicted against measured steps, 1 to 8 ranks on a cluster of four nodes.

The model is calibrated with one node and a pair of nodes; predictions are compared with what is measured elsewhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Bench, Part, Suite
from benchmarks.places import RanksFailed
from benchmarks.results_file import Record
from benchmarks.results_page import markdown
from hpctrain.scaling import (
    Fit,
    Layout,
    MeasuredStep,
    Node,
    ReadyBucket,
    Scenario,
    Setup,
    Workload,
    binding,
    fit_machine,
    machine_of,
    overlap_slowdown,
    spread_of_times,
    step_seconds,
    timed_of,
)

CALIBRATION_RATE = "1gbit"
ALONE = (Layout(1, 1), Layout(1, 2))
PAIRS = (Layout(2, 1), Layout(2, 2))
FOUR = (Layout(4, 1), Layout(4, 2))
CORES = 2  # of the machine, which all nodes of the cluster share
MEDIAN_BAR, WORST_BAR = 10.0, 20.0  # percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A start of ranks. rate: of the links, as tc writes it; None: not limited. found: what the ranks returned."""

    layout: Layout
    rate: str | None
    found: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A cell. calibrated: whether its step was used for the calibration."""

    name: str
    layout: Layout
    rate: str | None
    measured_s: float
    predicted_s: float
    binds: str
    calibrated: bool

    @property
    def error(self) -> float:
        """Of the prediction, in percent of the measured time."""
        return 100 * (self.predicted_s / self.measured_s - 1)


def bytes_per_s(rate: str) -> float:
    units = {"mbit": 1e6, "gbit": 1e9}
    return float(rate[:-4]) * units[rate[-4:]] / 8


def calibrated(launches: Sequence[Launch]) -> tuple[Fit, Node]:
    """Fits the machine to the all-reduces of the launches on one node and on pairs, and to what processors took for the
    bytes of a pair's link."""
    node = Node(cores=CORES, cores_shared_by=64, threads=1)
    documents = [launch.found["reductions"] for launch in launches if launch.layout.nodes <= 2]
    timed = [one for document in documents if document is not None for one in timed_of(document)]
    return fit_machine(timed, node=node, known=_moving(launches)), node


def _moving(launches: Sequence[Launch]) -> dict[str, float]:
    """Returns the rate of a core that moves bytes through a shaped link, each of which it sends and receives, and the
    share of the link's rate that was reached, where nothing takes turns."""
    for launch in launches:
        one = launch.found.get("moving")
        if one is not None and launch.rate is not None:
            each_s = one["bytes"] / launch.layout.nodes / bytes_per_s(launch.rate)
            return {
                "wire_bytes_per_s": 2 * one["bytes"] / one["processor_s"],
                "link_share": min(1.0, each_s / one["seconds"]),
            }
    return {}


def workload_from(alone: Mapping[str, Any], busy: Mapping[str, Any] | None) -> Workload:
    """Returns the workload of steps on one rank. busy: the same on all cores of one node."""
    compute_s = median(alone["rank_0_step_s"])
    slowdown = 1.0
    if busy is not None:
        both = [
            step - exposed for step, exposed in zip(busy["rank_0_step_s"], busy["exposed_s"], strict=True)
        ]
        slowdown = max(1.0, median(both) / compute_s)
    backward_s = min(alone["backward_s"], 0.95 * compute_s)
    update_s = min(alone["update_s"], compute_s - backward_s)
    return Workload(
        forward_s=compute_s - backward_s - update_s, backward_s=backward_s, update_s=update_s,
        samples=alone["samples"], sigma=spread_of_times(alone["rank_0_step_s"]), busy_slowdown=slowdown,
        buckets=tuple(
            ReadyBucket(size, min(1.0, ready_s / alone["backward_s"]))
            for size, ready_s in zip(alone["bytes"], alone["ready_s"], strict=True)
        ),
    )  # fmt: skip


def compared(launches: Sequence[Launch], *, calibration_rate: str) -> list[Compared]:
    """Returns each measured cell of several ranks with its prediction. calibration_rate: of the links with which the
    steps of a pair are used for the calibration."""
    fit, node = calibrated(launches)
    one_node = {launch.layout.ranks: launch.found["steps"] for launch in launches if launch.layout.nodes == 1}

    def scenario(cell: str, rate: str | None, workload: Workload) -> Scenario:
        machine = machine_of(
            fit.values, node=node, link_bytes_per_s=None if rate is None else bytes_per_s(rate)
        )
        return Scenario(
            machine=machine, workload=workload, setup=Setup(algorithm=cell.split()[1], wire="fp32")
        )

    def used(launch: Launch) -> bool:
        return launch.layout.nodes == 1 or (launch.layout.nodes == 2 and launch.rate == calibration_rate)

    pairs = [launch for launch in launches if launch.layout.nodes == 2 and used(launch)]
    workloads = {}
    for cell, steps in one_node[1].items():
        workload = workload_from(steps, one_node.get(2, {}).get(cell))
        measured = [
            MeasuredStep(
                scenario=scenario(cell, launch.rate, workload), layout=launch.layout,
                seconds=median(launch.found["steps"][cell]["step_s"]),
            )
            for launch in pairs
        ]  # fmt: skip
        workloads[cell] = replace(workload, overlap_slowdown=overlap_slowdown(measured))
    found = []
    for launch in launches:
        if launch.layout.ranks == 1:
            continue
        for cell, steps in launch.found["steps"].items():
            asked = scenario(cell, launch.rate, workloads[cell])
            found.append(
                Compared(
                    name=", ".join(cell.split()), layout=launch.layout, rate=launch.rate,
                    measured_s=median(steps["step_s"]), predicted_s=step_seconds(asked, launch.layout).step_s,
                    binds=binding(asked, launch.layout)[0], calibrated=used(launch),
                )
            )  # fmt: skip
    return found


def records_of(cells: Sequence[Compared], fit: Fit) -> list[Record]:
    """Returns the records of the errors' median and largest, over the cells that the calibration did not see."""
    unseen = [cell for cell in cells if not cell.calibrated]
    errors = [abs(cell.error) for cell in unseen]
    samples = {
        "cells": [
            {
                "cell": cell.name, "nodes": cell.layout.nodes, "ranks_per_node": cell.layout.ranks_per_node,
                "rate": cell.rate, "measured_s": cell.measured_s, "predicted_s": cell.predicted_s,
                "error_percent": cell.error, "binds": cell.binds, "calibrated": cell.calibrated,
            }
            for cell in cells
        ],
        "constants": dict(fit.values),
        "relative_standard_errors": fit.standard_errors(),
        "residual": fit.residual,
    }  # fmt: skip
    worst = max(unseen, key=lambda cell: abs(cell.error))
    at = f"{worst.name}, {worst.layout.nodes} x {worst.layout.ranks_per_node} at {worst.rate}"
    return [
        Record(id="prediction.1.median", what=f"median error of {len(unseen)} predicted steps", value=median(errors),
               bar=MEDIAN_BAR, sense="at most", unit="%", samples=samples),
        Record(id="prediction.1.worst", what=f"largest error: {at}", value=max(errors), bar=WORST_BAR, sense="at most",
               unit="%", samples={}),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the page


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    samples = {record["id"]: record["samples"] for record in content["records"]}.get("prediction.1.median")
    return {} if samples is None else {"prediction.cells": table_of(samples["cells"])}


def table_of(cells: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of all cells."""
    return markdown(
        ("nodes x ranks", "link", "model, algorithm", "measured, ms", "predicted, ms", "error", "binds"),
        (
            (
                f"{cell['nodes']} x {cell['ranks_per_node']}", cell["rate"] or "none",
                cell["cell"] + (" (calibration)" if cell["calibrated"] else ""), f"{1e3 * cell['measured_s']:.0f}",
                f"{1e3 * cell['predicted_s']:.0f}", f"{cell['error_percent']:+.0f}%", cell["binds"],
            )
            for cell in cells
        ),
    )  # fmt: skip


# ---------------------------------------------------------------------- the suite

_ALGORITHMS = ("hierarchical", "hierarchical-ring", "flat")
_REDUCTIONS = ("flat", "direct", "ring", "hierarchical", "hierarchical-ring")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements. sizes: of all-reduces, in bytes. few: fewer launches on four nodes."""

    sizes: tuple[int, ...] = (4096, 65_536, 1_048_576, 4_194_304, 16_777_216)
    repeats: int = 5
    models: tuple[str, ...] = ("transformer", "mlp")
    cell_s: float = 4.0
    few: bool = False


FULL = Scale()


def _predict(bench: Bench) -> list[Record]:
    kept: Path | None = bench.options.launches
    if kept is not None and kept.exists():
        launches = [
            Launch(layout=Layout(*one["layout"]), rate=one["rate"], found=one["found"])
            for one in json.loads(kept.read_text())
        ]
    else:
        launches = _measure(bench, kept=kept)
    if not all(any(launch.layout == layout for launch in launches) for layout in (*ALONE, *PAIRS)):
        raise RanksFailed("a launch on one node or on a pair failed, with which the model is calibrated")
    cells = compared(launches, calibration_rate=CALIBRATION_RATE)
    records = records_of(cells, calibrated(launches)[0])
    bench.say(f"all cells:\n{table_of(records[0].samples['cells'])}")
    del bench.starts[1:]  # they differ in the numbers of nodes and ranks
    return records


def _measure(bench: Bench, *, kept: Path | None) -> list[Launch]:
    launches: list[Launch] = []
    for rate, layouts in {"1gbit": (*ALONE, *PAIRS, *_few(bench, FOUR)), "300mbit": _few(bench, (PAIRS[-1], *FOUR)),
                          "100mbit": _few(bench, (PAIRS[-1], *FOUR))}.items():  # fmt: skip
        for layout in layouts:
            calibrates = rate == CALIBRATION_RATE and layout not in FOUR
            place = bench.on_cluster(
                "benchmarks.prediction.ranks",
                rate=rate,
                ranks_per_node=layout.ranks_per_node,
                num_nodes=layout.nodes,
            )
            settings = {
                "sizes": bench.scale.sizes if calibrates else (), "reductions": _REDUCTIONS,
                "repeats": bench.scale.repeats, "bytes_per_s": bytes_per_s(rate),
                "moving": calibrates and layout == PAIRS[-1], "workloads": bench.scale.models,
                "algorithms": _ALGORITHMS, "cell_s": bench.scale.cell_s,
            }  # fmt: skip
            with bench.attempt(f"{layout.nodes} x {layout.ranks_per_node} at {rate}"):
                found: Mapping[str, Any] = place.run("measure", settings, timeout_s=240)
                launches.append(Launch(layout=layout, rate=rate, found=found))
            if kept is not None:
                kept.write_text(json.dumps([
                    {"layout": [one.layout.nodes, one.layout.ranks_per_node], "rate": one.rate, "found": one.found}
                    for one in launches
                ]))  # fmt: skip
    return launches


def _few(bench: Bench, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    return layouts[-1:] if bench.scale.few else layouts


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launches", type=Path, metavar="PATH",
        help="file for the measurements; if it exists, they are only compared again",
    )  # fmt: skip


SUITE = Suite(
    name="prediction", about=__doc__, parts=(Part(figures=("1",), title="all launches", measure=_predict),),
    full=FULL, quick=replace(FULL, sizes=FULL.sizes[:4], repeats=3, models=FULL.models[:1], cell_s=1.0, few=True),
    tables=tables, options=_options,
)  # fmt: skip
