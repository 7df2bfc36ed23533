"""A calibrated model: constants with standard errors, and the errors of predictions that follow from these errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UsageError
from hpctrain.reduce import share_of_float32
from hpctrain.scaling.model.costs import ALGORITHMS, cost_of
from hpctrain.scaling.model.machine import Layout, Link, Machine, Node
from hpctrain.scaling.model.predict import Scenario, Setup, step_seconds
from hpctrain.scaling.model.workload import RunRecords, Workload, read_workload, workload_of

# Fits the constants of a machine to measured all-reduces, by least squares. Pure; needs scipy.


# Start values of the fit. A constant on which no measurement depends stays near its value here.
USUAL = {
    "latency_s": 40e-6, "link_share": 0.94, "message_s": 5e-6, "engine_message_s": 50e-6, "local_latency_s": 20e-6,
    "local_bytes_per_s": 4e9, "sum_bytes_per_s": 6e9, "code_bytes_per_s": 3e9, "wire_bytes_per_s": 3e9,
    "turns": 0.5, "engine_turns": 0.2,
}  # fmt: skip
# Standard deviation of the logarithm of what is usual: a factor of 20 either way. Of a link's rate less is in doubt:
# the headers of Ethernet, IP and TCP take 4 % of it.
USUAL_SPREAD = dict.fromkeys(USUAL, 3.0) | {"link_share": 0.05, "turns": 1.0, "engine_turns": 1.0}
KNOWN_SPREAD = 0.02  # of a constant that was measured by itself
INFINITE_RATE = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A measured reduction of `num_bytes` of float32.

    seconds: the slowest rank's time, as the median over the repeats. link_bytes_per_s: nominal rate of the nodes'
    links; None if the rate is not known.
    """

    algorithm: str
    wire: str
    num_bytes: int
    seconds: float
    layout: Layout
    link_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Result of the fit.

    values: constants by name, as in `USUAL`. covariance: covariance of the constants' logarithms, in the order of
    `names`.
    residual: standard deviation of the logarithm of measured / computed times.
    """

    values: Mapping[str, float]
    names: tuple[str, ...]
    covariance: NDArray[np.float64]
    residual: float

    def standard_errors(self) -> dict[str, float]:
        """Returns the relative standard error of each constant."""
        return dict(zip(self.names, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))


def timed_of(document: Mapping[str, Any]) -> list[Timed]:
    """Returns the measurements in a document of `hpctrain bench allreduce` for which the model has a formula.

    Raises UsageError if the document cannot be used.
    """
    if not str(document.get("schema", "")).startswith("hpctrain.bench.allreduce/"):
        raise UsageError("this is not a document of `hpctrain bench allreduce --json`")
    by_node = document["environment"]["ranks_by_node"]
    sizes = {len(ranks) for ranks in by_node}
    if len(sizes) > 1:
        raise UsageError(
            "the model assumes equal numbers of ranks on all nodes: measure the all-reduce with such a placement"
        )
    if document["settings"]["in_flight"] != 1:
        raise UsageError(
            f"the all-reduce was measured with {document['settings']['in_flight']} buckets in flight: measure it with "
            "one (--in-flight 1)"
        )
    link = document["link"]
    return [
        Timed(
            algorithm=cell["algorithm_run"], wire=cell["wire_run"], num_bytes=cell["bytes"],
            seconds=cell["seconds"]["median"], layout=Layout(len(by_node), len(by_node[0])),
            link_bytes_per_s=None if link is None else link["bytes_per_s"],
        )
        for cell in document["cells"]
        if cell["algorithm_run"] in ALGORITHMS and share_of_float32(cell["wire_run"]) is not None
    ]  # fmt: skip


def machine_of(values: Mapping[str, float], *, node: Node, link_bytes_per_s: float | None) -> Machine:
    """Returns the machine with the constants `values`.

    node: the node without these constants. link_bytes_per_s: nominal rate of the links; None: links without a rate
    limit.
    """
    rate = INFINITE_RATE if link_bytes_per_s is None else link_bytes_per_s * values["link_share"]
    return Machine(
        network=Link(latency_s=values["latency_s"], bytes_per_s=rate, per_message_s=values["message_s"],
                     turns=min(1.0, values["turns"])),
        local=Link(
            latency_s=values["local_latency_s"], bytes_per_s=values["local_bytes_per_s"],
            per_message_s=values["message_s"],
        ),
        node=replace(
            node, sum_bytes_per_s=values["sum_bytes_per_s"], code_bytes_per_s=values["code_bytes_per_s"],
            wire_bytes_per_s=values["wire_bytes_per_s"], engine_message_s=values["engine_message_s"],
            engine_turns=min(1.0, values["engine_turns"]),
        ),
    )  # fmt: skip


def fit_machine(measured: Sequence[Timed], *, node: Node, known: Mapping[str, float] | None = None) -> Fit:
    """Fits all constants at once to the logarithms of the times, so that small and large sizes count alike.

    known: constants that were measured separately. Outliers count less (soft L1). A constant on which no measurement
    depends keeps its value in `USUAL`, with a large standard error. Raises UsageError if nothing was measured on
    several ranks.
    """
    from scipy.optimize import least_squares

    useful = [one for one in measured if one.layout.ranks > 1]
    if not useful:
        raise UsageError("no all-reduce of several ranks was measured: measure one on at least two ranks")
    names = tuple(USUAL)
    known = known or {}
    usual = np.log([known.get(name, USUAL[name]) for name in names])
    spread = np.array([KNOWN_SPREAD if name in known else USUAL_SPREAD[name] for name in names])
    # Not the residual of the fit, which is not known yet: what a good fit of such times reaches.
    noise = 0.1

    def computed(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        times = []
        for one in useful:
            machine = machine_of(values, node=node, link_bytes_per_s=one.link_bytes_per_s)
            cost = cost_of(one.algorithm, one.num_bytes, wire=one.wire, layout=one.layout, machine=machine)
            times.append(cost.total_s)
        return np.log(times)

    observed = np.log([one.seconds for one in useful])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([(computed(logs) - observed) / noise, (logs - usual) / spread])

    found = least_squares(residuals, usual, loss="soft_l1", x_scale=1.0)
    values = dict(zip(names, np.exp(found.x).tolist(), strict=True))
    errors = computed(found.x) - observed
    residual = max(1e-3, 1.4826 * float(np.median(np.abs(errors))))
    jacobian = _jacobian(residuals, found.x)
    jacobian[: len(useful)] *= noise / residual
    covariance = np.asarray(np.linalg.inv(jacobian.T @ jacobian), dtype=np.float64)
    return Fit(values=values, names=names, covariance=covariance, residual=residual)


def _jacobian(function: Any, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the Jacobian by central differences."""
    columns = []
    for place in range(len(at)):
        shift = np.zeros(len(at))
        shift[place] = 1e-3
        columns.append((function(at + shift) - function(at - shift)) / 2e-3)
    return np.stack(columns, axis=1)


# How much slower computation is while reductions are under way, from measured steps on a pair of nodes.
# Pure.


MOST = 8.0
_HALVINGS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measured step of `scenario` on `layout`: the median seconds, without input and checkpoints."""

    scenario: Scenario
    layout: Layout
    seconds: float


def overlap_slowdown(measured: Sequence[MeasuredStep]) -> float:
    """Returns how many times slower computation must be for predicted steps to last as long as measured steps.

    The factor is between 1 and `MOST`. With several steps, the factor makes the geometric mean of predicted / measured
    equal to 1. The factor is found by bisection, since slower computation never makes a step shorter. Returns 1 if
    there are no steps.
    """
    low, high = 0.0, math.log(MOST)
    if not measured or _too_long(measured, 1.0):
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _too_long(measured, math.exp(middle)) else (middle, high)
    return math.exp(high)


def _too_long(measured: Sequence[MeasuredStep], slowdown: float) -> bool:
    ratios = [math.log(_predicted_s(one, slowdown) / one.seconds) for one in measured]
    return sum(ratios) >= 0


def _predicted_s(one: MeasuredStep, slowdown: float) -> float:
    workload = replace(one.scenario.workload, overlap_slowdown=slowdown, input_s=0.0, checkpoint_s=0.0)
    return step_seconds(replace(one.scenario, workload=workload), one.layout).step_s


# A calibrated model.


STEP_OF_DIFFERENCE = 1e-2  # of a constant's logarithm
TWO_SIDED_90 = 1.645
Of = Callable[[Scenario, Layout], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalibration:
    """A model whose constants are fitted to measurements.

    fit: constants of the machine. node: the node without these constants. scenario: the scenario that is predicted.
    run: the records of the run from which the scenario's workload and settings come. link_bytes_per_s: nominal rate of
    the links in the predictions. compute_error: relative standard error of the computation's time. notes: texts that a
    reader needs to judge the predictions.
    """

    fit: Fit
    node: Node
    scenario: Scenario
    run: RunRecords
    link_bytes_per_s: float | None
    compute_error: float
    notes: tuple[str, ...] = ()

    def with_scenario(self, scenario: Scenario) -> ModelCalibration:
        return replace(self, scenario=scenario)

    def shifted(self, logs: Mapping[str, float]) -> Scenario:
        """Returns the scenario with each constant that is named in `logs` multiplied by exp(logs[name])."""
        values = {name: value * math.exp(logs.get(name, 0.0)) for name, value in self.fit.values.items()}
        machine = machine_of(values, node=self.node, link_bytes_per_s=self.link_bytes_per_s)
        workload = self.scenario.workload.with_slower_computation(math.exp(logs.get("compute", 0.0)))
        return replace(self.scenario, machine=machine, workload=workload)

    @property
    def errors(self) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """The names of all uncertain constants, and the covariance of the constants' logarithms."""
        size = len(self.fit.names)
        covariance = np.zeros((size + 1, size + 1))
        covariance[:size, :size] = self.fit.covariance
        covariance[size, size] = self.compute_error**2
        return (*self.fit.names, "compute"), covariance


def relative_error(calibration: ModelCalibration, layout: Layout, *, of: Of | None = None) -> float:
    """Returns the relative standard error of a prediction.

    of: function that returns the predicted value; by default the time of a step. The errors of the constants are
    propagated to first order. The residual of the fit is added for the share of the step that waits for communication.
    """
    value = of or (lambda scenario, at: step_seconds(scenario, at).step_s)
    names, covariance = calibration.errors
    slopes = np.array([
        (
            math.log(value(calibration.shifted({name: STEP_OF_DIFFERENCE}), layout))
            - math.log(value(calibration.shifted({name: -STEP_OF_DIFFERENCE}), layout))
        )
        / (2 * STEP_OF_DIFFERENCE)
        for name in names
    ])  # fmt: skip
    step = step_seconds(calibration.scenario, layout)
    model = calibration.fit.residual * step.exposed_s / step.step_s
    return math.sqrt(float(slopes @ covariance @ slopes) + model**2)


def interval(calibration: ModelCalibration, layout: Layout) -> tuple[float, float]:
    """Returns the 90 % confidence interval of the step's seconds: the lower and the upper end."""
    step_s = step_seconds(calibration.scenario, layout).step_s
    error = TWO_SIDED_90 * relative_error(calibration, layout)
    return step_s * math.exp(-error), step_s * math.exp(error)


def calibrate_model(
    sources: Sequence[Path], *, link_bytes_per_s: float | None = None, cores_shared_by: int = 1
) -> ModelCalibration:
    """Reads documents of `hpctrain bench allreduce --json` and run directories, and fits the model.

    The workload is that of the run with the fewest ranks. From other runs on one node with the same batch per rank, the
    model learns how much slower cores are if all are busy; from runs on several nodes, how much slower computation is
    during reductions. link_bytes_per_s: rate of the links in the predictions; None: the rate in the documents.
    cores_shared_by: number of nodes that share the cores of one machine. Raises UsageError.
    """
    documents = [json.loads(_read(path)) for path in sources if path.is_file()]
    runs = sorted((read_workload(path) for path in sources if path.is_dir()), key=lambda run: run.ranks)
    if not documents or not runs:
        raise UsageError(
            "--calibration needs a document of `hpctrain bench allreduce --json` and the directory of a training run "
            "on one node: give the option once for each"
        )
    alone, on_a_node = runs[0], [run for run in runs if run.nodes == 1]
    busy = [run for run in on_a_node[1:] if run.ranks * run.threads >= run.cores > 1]
    notes = []
    if alone.nodes > 1:
        notes.append(f"the run was made on {alone.nodes} nodes: its waits count as computation")
    node = Node(
        cores=max(1, alone.cores), cores_shared_by=cores_shared_by, threads=alone.threads,
    )  # fmt: skip
    measured = [one for document in documents for one in timed_of(document)]
    fit = fit_machine(measured, node=node)
    rates = [one.link_bytes_per_s for one in measured if one.link_bytes_per_s is not None]
    rate = link_bytes_per_s or (max(rates) if rates else None)
    if rate is None:
        notes.append("no rate of the links is known: give --link, or measure with --link-mbit")
    workload = workload_of(alone, busy=busy)
    spread = [run for run in runs[1:] if run.nodes > 1]
    workload = replace(
        workload,
        overlap_slowdown=_overlap_slowdown(spread, workload, fit=fit, node=node, rates=rates, notes=notes),
    )
    setup = Setup(
        algorithm=alone.algorithm if alone.ranks > 1 else "hierarchical", wire=alone.wire, overlap=True
    )
    scenario = Scenario(
        machine=machine_of(fit.values, node=node, link_bytes_per_s=rate), workload=workload, setup=setup
    )
    steps = sum(map(len, alone.compute_s))
    return ModelCalibration(
        fit=fit, node=node, scenario=scenario, run=alone, link_bytes_per_s=rate,
        # Of a median of n lognormal times; runs of the same program differ by a percent or two besides.
        compute_error=math.hypot(1.2533 * workload.sigma / math.sqrt(steps), 0.02), notes=tuple(notes),
    )  # fmt: skip


def _overlap_slowdown(
    runs: Sequence[RunRecords], workload: Workload, *, fit: Fit, node: Node, rates: Sequence[float], notes: list[str]
) -> float:  # fmt: skip
    """Returns `overlap_slowdown` of the runs, and adds a note for each run that cannot be used.

    rates: nominal rates of the links of these runs.
    """
    machine = machine_of(fit.values, node=node, link_bytes_per_s=max(rates) if rates else None)
    measured = []
    for run in runs:
        if run.algorithm not in ALGORITHMS or share_of_float32(run.wire) is None or not run.overlap:
            notes.append(
                f"the run on {run.nodes} nodes ({run.algorithm}, {run.wire}) is not used: the model has no formula for "
                "its algorithm or wire format, or its reductions do not overlap with backward. Train with another "
                "reduction.algorithm or reduction.wire"
            )
            continue
        if run.samples != workload.samples:
            raise UsageError(
                f"the runs of --calibration have {workload.samples} and {run.samples} samples per rank and step: use "
                "runs with the same number"
            )
        setup = Setup(algorithm=run.algorithm, wire=run.wire)
        measured.append(
            MeasuredStep(
                scenario=Scenario(machine=machine, workload=workload, setup=setup),
                layout=Layout(run.nodes, run.ranks // run.nodes),
                seconds=run.step_s - run.input_s - run.checkpoint_s,
            )
        )
    return overlap_slowdown(measured)


def calibration_record(calibration: ModelCalibration) -> dict[str, Any]:
    """Returns the constants, their standard errors and the workload as JSON."""
    workload, fit = calibration.scenario.workload, calibration.fit
    return {
        "constants": {
            name: {"value": fit.values[name], "relative_standard_error": error}
            for name, error in fit.standard_errors().items()
        },
        "residual": fit.residual,
        "link_bytes_per_s": calibration.link_bytes_per_s,
        "workload": {
            "forward_s": workload.forward_s, "backward_s": workload.backward_s, "update_s": workload.update_s,
            "samples": workload.samples, "sigma": workload.sigma, "busy_slowdown": workload.busy_slowdown,
            "overlap_slowdown": workload.overlap_slowdown,
            "gradient_bytes": workload.gradient_bytes, "buckets": len(workload.buckets),
            "compute_relative_standard_error": calibration.compute_error,
        },
    }  # fmt: skip


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--calibration {path} cannot be read: {error.strerror}") from error
