"""`python -m benchmarks.prediction`: predicted against measured steps, 1 to 8 ranks on a cluster of four nodes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results_page
from benchmarks.command import finish, open_console, parser_of, saying
from benchmarks.prediction.compare import (
    Launch,
    bytes_per_s,
    calibrated,
    compared,
    records_of,
    table_of,
)
from benchmarks.reduction.places import OnCluster, RanksFailed
from benchmarks.results_file import Run, about_this_run
from benchmarks.starting import REPOSITORY, Start
from hpctrain.scaling import Layout
from tests.cluster import Cluster, ClusterPlan, why_not
from tests.cluster.cluster import CLUSTERS

FIGURE = "prediction.1"
RATES = ("100mbit", "300mbit", "1gbit")
CALIBRATION_RATE = "1gbit"
ALONE = (Layout(1, 1), Layout(1, 2))
PAIRS = (Layout(2, 1), Layout(2, 2))
FOUR = (Layout(4, 1), Layout(4, 2))
ALGORITHMS = ("hierarchical", "hierarchical-ring", "flat")
REDUCTIONS = ("flat", "direct", "ring", "hierarchical", "hierarchical-ring")
SIZES = (4096, 65_536, 1_048_576, 4_194_304, 16_777_216)
MODELS = ("transformer", "mlp")


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("prediction", description=__doc__, figures="1")
    parser.add_argument(
        "--launches", type=Path, metavar="PATH", help="keep what was measured, or compare it anew"
    )
    arguments = parser.parse_args(words)
    console = open_console()
    say = saying(console)
    about = about_this_run(REPOSITORY, benchmark="prediction")
    starts: list[Start] = []
    kept: Path | None = arguments.launches
    if kept is not None and kept.exists():
        launches = [
            Launch(layout=Layout(*one["layout"]), rate=one["rate"], found=one["found"])
            for one in json.loads(kept.read_text())
        ]
    else:
        if (reason := why_not()) is not None:
            say(f"not measured, no cluster: {reason}")
            return 1
        launches = _measure(quick=arguments.quick, say=say, starts=starts, kept=kept)
    if not all(any(launch.layout == layout for launch in launches) for layout in (*ALONE, *PAIRS)):
        say("no predictions: a launch on one node or on a pair failed, with which the model is calibrated")
        run = Run(failed={FIGURE: ["the calibration's launches"]})
        return finish(
            console, run, benchmark="prediction", about=about, output=arguments.output, refresh=_refresh
        )
    cells = compared(launches, calibration_rate=CALIBRATION_RATE)
    records = records_of(cells, calibrated(launches)[0])
    console.print(table_of(records[0].samples["cells"]), markup=False)
    started = {FIGURE: {"all launches": [start.as_json() for start in starts[:1]]}} if starts else {}
    run = Run(records=records, started=started)
    return finish(
        console, run, benchmark="prediction", about=about, output=arguments.output, refresh=_refresh
    )


def _measure(
    *, quick: bool, say: Callable[[str], None], starts: list[Start], kept: Path | None
) -> list[Launch]:
    plan = ClusterPlan(directory=CLUSTERS / f"bench-{os.getpid()}", num_nodes=4)
    launches: list[Launch] = []
    with Cluster.up(plan) as cluster:

        def launch(layout: Layout, rate: str, *, reductions: bool) -> None:
            cluster.set_rate(rate)
            place = OnCluster(
                cluster,
                ranks_per_node=layout.ranks_per_node,
                num_nodes=layout.nodes,
                module="benchmarks.prediction.ranks",
            )
            settings = {
                "sizes": (SIZES[:4] if quick else SIZES) if reductions else (),
                "reductions": REDUCTIONS, "repeats": 3 if quick else 5,
                "bytes_per_s": bytes_per_s(rate), "moving": reductions and layout == PAIRS[-1],
                "workloads": MODELS[:1] if quick else MODELS, "algorithms": ALGORITHMS,
                "cell_s": 1.0 if quick else 4.0,
            }  # fmt: skip
            try:
                found: Mapping[str, Any] = place.run("measure", settings, timeout_s=240)
            except RanksFailed as error:
                say(f"{layout.nodes} x {layout.ranks_per_node} at {rate}: failed: {error}")
                return
            starts.extend(place.starts)
            launches.append(Launch(layout=layout, rate=rate, found=found))
            say(f"{layout.nodes} x {layout.ranks_per_node} at {rate}")
            if kept is not None:
                kept.write_text(json.dumps([
                    {"layout": [one.layout.nodes, one.layout.ranks_per_node], "rate": one.rate, "found": one.found}
                    for one in launches
                ]))  # fmt: skip

        for layout in ALONE:
            launch(layout, CALIBRATION_RATE, reductions=True)
        for layout in PAIRS:
            launch(layout, CALIBRATION_RATE, reductions=True)
        for rate in (CALIBRATION_RATE, "300mbit", "100mbit"):
            layouts = FOUR if rate == CALIBRATION_RATE else (PAIRS[-1], *FOUR)
            for layout in layouts[-1:] if quick else layouts:
                launch(layout, rate, reductions=False)
    return launches


def _refresh(page: Path, content: Mapping[str, Any]) -> None:
    cells = next(
        (r["samples"]["cells"] for r in content["records"] if r["id"] == "prediction.1.median"), None
    )
    more = {} if cells is None else {"prediction.cells": table_of(cells)}
    results_page.refresh(page, content, more=more)


if __name__ == "__main__":
    sys.exit(main())
