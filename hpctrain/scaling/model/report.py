"""Predictions for several numbers of nodes: rows, JSON document, table, plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.reduce import WIRE_FORMATS
from hpctrain.scaling.model.calibrate import (
    TWO_SIDED_90,
    ModelCalibration,
    calibration_record,
    interval,
    relative_error,
)
from hpctrain.scaling.model.costs import actual_algorithm
from hpctrain.scaling.model.machine import Layout, wire_share
from hpctrain.scaling.model.predict import Scenario, Step, binding, predicted_efficiency, step_seconds

if TYPE_CHECKING:
    from rich.table import Table

# Changes that would make a step shorter: the model is evaluated again with each of them. Pure.


WORTH = 0.01  # share of the throughput from which on a change is listed
BUCKETS_BYTES = tuple(float(2**k) for k in range(18, 27))
LOCAL_STEPS = 4


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that makes steps shorter.

    gain: samples/s with the change / samples/s without the change, minus 1. costs: the disadvantage of the change, as
    text; "" if the change has no disadvantage.
    """

    change: str
    gain: float
    costs: str = ""


def advice(scenario: Scenario, layout: Layout) -> list[Advice]:
    """Returns the changes that increase samples/s by at least 1 %, the best first."""
    before = _samples_per_s(scenario, layout)
    found = [
        Advice(change, _samples_per_s(changed, layout) / before - 1, costs)
        for change, changed, costs in _changes(scenario, layout)
    ]
    return sorted((one for one in found if one.gain >= WORTH), key=lambda one: -one.gain)


def _samples_per_s(scenario: Scenario, layout: Layout) -> float:
    return scenario.workload.samples / step_seconds(scenario, layout).step_s


def _changes(scenario: Scenario, layout: Layout) -> Iterator[tuple[str, Scenario, str]]:
    setup, workload, machine = scenario.setup, scenario.workload, scenario.machine
    share = wire_share(setup.wire)
    for name, wire in WIRE_FORMATS.items():
        if wire.price and name != setup.wire and wire_share(name) <= share:
            yield f"wire = {name}", replace(scenario, setup=replace(setup, wire=name)), wire.price
    runs = actual_algorithm(setup.algorithm, layout, wire=setup.wire)
    for algorithm in ("hierarchical", "hierarchical-ring", "ring", "direct", "flat"):
        if actual_algorithm(algorithm, layout, wire=setup.wire) not in (runs, setup.algorithm):
            yield f"algorithm = {algorithm}", replace(scenario, setup=replace(setup, algorithm=algorithm)), ""
    if setup.fusion is None:
        sizes: list[Callable[[], tuple[float, Scenario]]] = [
            lambda size=size: (size, replace(scenario, workload=workload.with_bucket_bytes(size)))  # type: ignore[misc]
            for size in BUCKETS_BYTES
            if size <= workload.gradient_bytes
        ]
        if sizes:
            size, best = min(
                (make() for make in sizes), key=lambda pair: step_seconds(pair[1], layout).step_s
            )
            yield f"bucket_mb = {size / 1e6:.3g}", best, ""
    yield (
        "twice the batch per rank",
        replace(scenario, workload=workload.with_samples(2 * workload.samples)),
        "a larger global batch may need more epochs",
    )
    if setup.local_steps < LOCAL_STEPS:
        yield (
            f"local SGD, an average every {LOCAL_STEPS} steps",
            replace(scenario, setup=replace(setup, local_steps=LOCAL_STEPS)),
            "another algorithm of training: reduction.schedule",
        )
    yield (
        "twice the network bandwidth",
        replace(scenario, machine=machine.with_rate(2 * machine.network.bytes_per_s)),
        "",
    )
    node = machine.node
    if not node.offloaded:
        cores = replace(machine, node=replace(node, cores=2 * node.cores))
        yield "twice the cores", replace(scenario, machine=cores), ""


# Predictions for several numbers of nodes.


SCHEMA = "hpctrain.bench.predict/1"
MOST_ADVICE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """The prediction for one layout.

    low_s, high_s: interval of the step's seconds at a confidence of 90 %. low, high: interval of the efficiency at the
    same confidence. binds: the resource that limits the step. saved: share of the step that would be saved if that
    resource were infinitely fast.
    """

    layout: Layout
    step: Step
    low_s: float
    high_s: float
    samples_per_s: float
    efficiency: float
    low: float
    high: float
    binds: str
    saved: float
    advice: tuple[Advice, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "nodes": self.layout.nodes, "ranks": self.layout.ranks, "seconds": asdict(self.step),
            "step_s_90": [self.low_s, self.high_s], "samples_per_s": self.samples_per_s,
            "efficiency": self.efficiency, "efficiency_90": [self.low, self.high], "binds": self.binds,
            "saved_without": self.saved, "advice": [asdict(one) for one in self.advice],
        }  # fmt: skip


def predicted_rows(calibration: ModelCalibration, layouts: Sequence[Layout]) -> list[PredictedRow]:
    """Returns the prediction for each layout: step time, efficiency, their intervals, and the limiting resource."""
    return [_row(calibration, layout) for layout in layouts]


def _row(calibration: ModelCalibration, layout: Layout) -> PredictedRow:
    scenario = calibration.scenario
    step = step_seconds(scenario, layout)
    low_s, high_s = interval(calibration, layout)
    efficiency = predicted_efficiency(scenario, layout, step)
    error = TWO_SIDED_90 * relative_error(
        calibration,
        layout,
        of=lambda shifted, at: predicted_efficiency(shifted, at, step_seconds(shifted, at)),
    )
    binds, saved = binding(scenario, layout)
    return PredictedRow(
        layout=layout, step=step, low_s=low_s, high_s=high_s,
        samples_per_s=layout.ranks * scenario.workload.samples / step.step_s, efficiency=efficiency,
        low=efficiency * math.exp(-error), high=min(1.0, efficiency * math.exp(error)), binds=binds, saved=saved,
        advice=tuple(advice(scenario, layout)),
    )  # fmt: skip


def prediction_document(calibration: ModelCalibration, rows: Sequence[PredictedRow]) -> dict[str, Any]:
    """Returns the JSON document of `--json`; docs/guides/predicting.md describes its fields."""
    return {
        "schema": SCHEMA,
        "calibration": calibration_record(calibration),
        "setup": asdict(calibration.scenario.setup),
        "notes": list(calibration.notes),
        "predictions": [row.as_json() for row in rows],
    }


def prediction_table(calibration: ModelCalibration, rows: Sequence[PredictedRow], *, title: str) -> Table:
    """Returns the predictions as a table for the terminal, one line per layout."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("nodes", "ranks", "step, ms", "90 %", "samples/s", "efficiency", "90 %"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("binds", no_wrap=True)
    table.add_column("what would help")
    for row in rows:
        table.add_row(
            f"{row.layout.nodes:,}",
            f"{row.layout.ranks:,}",
            f"{1e3 * row.step.step_s:.4g}",
            f"{1e3 * row.low_s:.3g}-{1e3 * row.high_s:.3g}",
            f"{row.samples_per_s:,.0f}",
            f"{row.efficiency:.0%}",
            f"{row.low:.0%}-{row.high:.0%}",
            f"{row.binds} {row.saved:.0%}" if row.saved else row.binds,
            ", ".join(f"{one.change} +{one.gain:.0%}" for one in row.advice[:MOST_ADVICE]),
        )
    return table


def plot_predictions(rows: Sequence[PredictedRow], path: Path, *, title: str) -> None:
    """Writes a figure to `path`: the efficiency with its 90 % band, and samples/s compared with linear scaling."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display on a compute node
    from matplotlib import pyplot as plt

    nodes = [row.layout.nodes for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    try:
        left.plot(nodes, [row.efficiency for row in rows], marker="o", markersize=4, color="C0")
        left.fill_between(nodes, [row.low for row in rows], [row.high for row in rows], color="C0", alpha=0.2)
        left.set_ylim(0, 1.05)
        left.set_ylabel("efficiency, 90 % band")
        each = rows[0].samples_per_s / rows[0].layout.ranks / rows[0].efficiency
        right.plot(nodes, [row.samples_per_s for row in rows], marker="o", markersize=4, color="C0")
        right.plot(
            nodes, [each * row.layout.ranks for row in rows], color="0.5", linestyle="--", label="linear"
        )
        right.set_yscale("log")
        right.set_ylabel("samples/s")
        right.legend(fontsize="small")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("nodes")
            axes.grid(visible=True, which="major", alpha=0.3)
        figure.suptitle(title, fontsize="medium")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)
