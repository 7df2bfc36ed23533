"""Fits the constants of a machine to measured all-reduces, by least squares. Pure; needs scipy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UsageError
from hpctrain.scaling.model.costs import ALGORITHMS, cost_of
from hpctrain.scaling.model.machine import WIRE_SHARE, Layout, Link, Machine, Node

# Where the search begins, and what a constant stays near that the measurements say nothing about.
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
    """A measured reduction of `num_bytes` of float32: the median of the slowest rank's times. link_bytes_per_s:
    nominal rate of the nodes' links; None: the links are not limited to a known rate."""

    algorithm: str
    wire: str
    num_bytes: int
    seconds: float
    layout: Layout
    link_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Constants by name, as in `USUAL`. covariance: of their logarithms, in the order of `names`. residual: standard
    deviation of the logarithm of measured / computed times."""

    values: Mapping[str, float]
    names: tuple[str, ...]
    covariance: NDArray[np.float64]
    residual: float

    def standard_errors(self) -> dict[str, float]:
        """Returns the relative standard error of each constant."""
        return dict(zip(self.names, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))


def timed_of(document: Mapping[str, Any]) -> list[Timed]:
    """Returns the cells of a document of `hpctrain bench allreduce` that the model has a formula for."""
    if not str(document.get("schema", "")).startswith("hpctrain.bench.allreduce/"):
        raise UsageError("this is no document of `hpctrain bench allreduce --json`")
    by_node = document["environment"]["ranks_by_node"]
    sizes = {len(ranks) for ranks in by_node}
    if len(sizes) > 1:
        raise UsageError(
            "the model takes equally many ranks on each node: measure the all-reduce with such a placement"
        )
    if document["settings"]["in_flight"] != 1:
        raise UsageError("calibrate with one bucket in flight (--in-flight 1)")
    link = document["link"]
    return [
        Timed(
            algorithm=cell["algorithm_run"], wire=cell["wire_run"], num_bytes=cell["bytes"],
            seconds=cell["seconds"]["median"], layout=Layout(len(by_node), len(by_node[0])),
            link_bytes_per_s=None if link is None else link["bytes_per_s"],
        )
        for cell in document["cells"]
        if cell["algorithm_run"] in ALGORITHMS and cell["wire_run"] in WIRE_SHARE
    ]  # fmt: skip


def machine_of(values: Mapping[str, float], *, node: Node, link_bytes_per_s: float | None) -> Machine:
    """Returns the machine with these constants and links of this nominal rate."""
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

    known: constants that were measured by themselves. Outliers count less (soft L1). A constant that no measurement
    depends on stays at what is usual, with its wide spread. Raises UsageError if nothing was measured on several ranks.
    """
    from scipy.optimize import least_squares

    useful = [one for one in measured if one.layout.ranks > 1]
    if not useful:
        raise UsageError("no measured all-reduce of several ranks: calibrate with at least two")
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
    """Central differences."""
    columns = []
    for place in range(len(at)):
        shift = np.zeros(len(at))
        shift[place] = 1e-3
        columns.append((function(at + shift) - function(at - shift)) / 2e-3)
    return np.stack(columns, axis=1)
