"""Predicts a running job's step on another number of nodes, from the parts of its measured step. Pure functions.

The global batch stays, so that the run computes the same on any number of nodes (strong scaling). Each part of the
measured step is scaled by its own rule, and each rule has an error:

| part | on n nodes instead of N | error |
| --- | --- | --- |
| computing | a share is constant, the rest is proportional to the samples of a rank | that of the share |
| exposed reduction | formulas of `scaling.model`, times the factor that the measured one shows | of the factor |
| waiting for slower ranks | expected largest of so many lognormal times | half of the part |
| input | between constant (shared storage limits) and proportional to a rank's samples | half of the range |
| evaluation | proportional to 1 / ranks | a fifth of the part |
| checkpoint, other | constant | three tenths of the part |

Errors are added in quadrature. The interval of a prediction is 1.645 standard errors on each side, 90 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from hpctrain.errors import UsageError
from hpctrain.reduce import share_of_float32
from hpctrain.scaling.model.calibrate import INFINITE_RATE, TWO_SIDED_90, USUAL, machine_of
from hpctrain.scaling.model.costs import ALGORITHMS, cost_of
from hpctrain.scaling.model.machine import Layout, Machine, Node
from hpctrain.scaling.model.predict import Scenario, Setup, Step, step_seconds
from hpctrain.scaling.model.workload import ReadyBucket, Workload, slowest_factor

# Standard errors. Of the reductions' factor: the residual of the model's fit and its largest errors without
# calibration steps, docs/benchmarks/prediction.md; it grows with the distance from what was measured.
ANCHORED, PROBED, NOMINAL, NEARBY = 0.13, 0.4, 0.7, 0.5
EVALUATION, CONSTANT_PARTS, WAITING = 0.2, 0.3, 0.5
COMPUTING = 0.02  # of the same program on other nodes
MOVING = 0.3  # of the time that a stop and a start take
# While reductions run, computing takes longer: 1.05 to 1.7 times in docs/benchmarks/prediction.md, on cores that
# reductions share.
OVERLAP, OVERLAP_ERROR = 1.15, 0.15
# Below this share of the step, exposed time says little about the speed of the reductions.
_LEAST_EXPOSED = 0.02
_HALVINGS, _MOST_FACTOR = 40, 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedShare:
    """The share of a rank's computing that does not depend on its number of samples, and its standard error.

    source: where the share comes from, as text.
    """

    value: float
    error: float
    source: str

    def scaled(self, samples_ratio: float) -> float:
        """Returns the time of computing with `samples_ratio` times as many samples, divided by the time now."""
        return self.value + (1 - self.value) * samples_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The link of a node, in one direction. measured: False if `bytes_per_s` is a nominal rate that somebody gave."""

    bytes_per_s: float
    latency_s: float
    source: str
    measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """What a run has measured of itself.

    Attributes:
        ranks_per_node: The ranks of each node, which stay the same on any number of nodes.
        steps_left: The steps that the run has to do; of a finished run, all its steps.
        parts: The seconds per step of each part, by the names in `PART_NAMES`, as the mean over ranks and steps.
        steps: The number of steps in `parts`.
        noise: The relative standard error of the mean step.
        sigma: The variation of a rank's computing from step to step, see `slowest_factor`.
        backward_share, update_share: The shares of backward and of the optimizer in computing.
        buckets: The gradients in the order of their reduction.
        cores: The cores of a node.
        offloaded: True if communication takes no time of the cores that compute, as on GPUs.
        link: The link between nodes; None if its rate is not known.
        move_s: The seconds that the run would take to stop, save and start on other nodes, without waiting for nodes.
        watts: The mean power of a node; None if no counter could be read.
        least_nodes, most_nodes: The limits of the recipe's section [scaling]; None: no limit.
    """

    nodes: int
    ranks_per_node: int
    global_batch: int
    steps_left: int
    parts: Mapping[str, float]
    steps: int
    noise: float
    sigma: float
    fixed: FixedShare
    backward_share: float
    update_share: float
    buckets: tuple[ReadyBucket, ...]
    algorithm: str
    wire: str
    overlap: bool = True
    cores: int = 1
    threads: int = 1
    offloaded: bool = False
    link: MeasuredLink | None = None
    move_s: float = 0.0
    watts: float | None = None
    least_nodes: int | None = None
    most_nodes: int | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS or share_of_float32(self.wire) is None:
            raise UsageError(
                f"the model has no formula for reductions by {self.algorithm} with {self.wire} on the wire"
            )
        if not self.buckets or self.computing_s <= 0:
            raise UsageError("the run has not recorded its buckets of gradients, or no time of computing")

    @property
    def layout(self) -> Layout:
        return Layout(self.nodes, self.ranks_per_node)

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def computing_s(self) -> float:
        return self.parts["compute"] + self.parts["hidden_reduction"]

    def samples(self, layout: Layout) -> int:
        """Returns the samples per step of the rank that has most."""
        return -(-self.global_batch // layout.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesPrediction:
    """The rest of a run on a number of nodes.

    Attributes:
        parts: The predicted seconds per step, by the names in `PART_NAMES`.
        step_s, low_s, high_s: The step, and its 90 % interval.
        time_s, time_low_s, time_high_s: The time until the last step is done, including stop and start if the number of
            nodes changes, and its 90 % interval.
        node_hours: Nodes times `time_s`.
        energy_j: The energy of the nodes in joules, at the power per node that was measured; None if not measured.
    """

    nodes: int
    ranks: int
    parts: Mapping[str, float]
    step_s: float
    low_s: float
    high_s: float
    time_s: float
    time_low_s: float
    time_high_s: float
    node_hours: float
    energy_j: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reductions:
    """The model of a job's reductions. factor: by how much they are longer than by the formulas."""

    job: MeasuredJob
    machine: Machine
    factor: float

    @classmethod
    def of(cls, job: MeasuredJob, *, link: MeasuredLink | None) -> _Reductions:
        """Finds the factor with which the model has the measured time of the reductions.

        If enough of the step is exposed reduction, this time counts, otherwise the time of all reductions. On one rank
        nothing is measured, and the factor is 1.
        """
        cores = max(job.cores, job.ranks_per_node * job.threads)
        node = Node(cores=cores, threads=job.threads, offloaded=job.offloaded)
        values = USUAL | {"link_share": 1.0}
        if link is not None:
            values["latency_s"] = link.latency_s
        machine = machine_of(
            values, node=node, link_bytes_per_s=INFINITE_RATE if link is None else link.bytes_per_s
        )
        plain = cls(job=job, machine=machine, factor=1.0)
        if job.layout.ranks == 1:
            return plain
        exposed_s, hidden_s = job.parts["exposed_reduction"], job.parts["hidden_reduction"]
        only_exposed = exposed_s >= _LEAST_EXPOSED * job.step_s
        target_s = exposed_s if only_exposed else exposed_s + hidden_s
        low, high = -math.log(_MOST_FACTOR), math.log(_MOST_FACTOR)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = cls(job=job, machine=machine, factor=math.exp(middle)).step(
                job.layout, computing_s=job.computing_s
            )
            seconds = found.exposed_s + (0.0 if only_exposed else found.overlapped_s)
            low, high = (low, middle) if seconds >= target_s else (middle, high)
        return cls(job=job, machine=machine, factor=math.exp(high))

    def step(self, layout: Layout, *, computing_s: float, times: float = 1.0) -> Step:
        """Returns the step of a rank that computes for `computing_s`, with reductions that are `times` as long."""
        job = self.job
        backward_s, update_s = (share * computing_s for share in (job.backward_share, job.update_share))
        workload = Workload(
            forward_s=max(0.0, computing_s - backward_s - update_s), backward_s=backward_s, update_s=update_s,
            samples=job.samples(layout), buckets=job.buckets,
        )  # fmt: skip
        machine = _slower(self.machine, self.factor * times)
        setup = Setup(algorithm=_two_levels(job), wire=job.wire, overlap=job.overlap)
        return step_seconds(Scenario(machine=machine, workload=workload, setup=setup), layout)

    def error(self, layout: Layout) -> float:
        """Returns the standard error of the logarithm of the reductions' time."""
        job = self.job
        if layout == job.layout:
            return 0.0
        if layout.nodes == 1:
            return NEARBY  # the links within the node were never the limit
        if job.nodes > 1:
            return ANCHORED * math.sqrt(max(1.0, abs(math.log2(layout.nodes / job.nodes))))
        return PROBED if job.link is not None and job.link.measured else NOMINAL


@final
class NodesModel:
    """Predicts the rest of a run on any number of nodes."""

    def __init__(self, job: MeasuredJob) -> None:
        self.job = job
        self._reductions = _Reductions.of(job, link=_link_of(job))

    def why_not(self, nodes: int) -> str:
        """Returns why nothing can be said about a number of nodes; "" if something can be said."""
        job = self.job
        if job.nodes == 1 < nodes and job.link is None:
            return (
                "a run on one node does not measure the link between nodes: give its rate by scaling.link in the "
                "recipe, or by --link of `hpctrain report`"
            )
        if (ranks := nodes * job.ranks_per_node) > job.global_batch:
            return f"{nodes} nodes have {ranks} ranks, and the global batch has {job.global_batch} samples"
        return ""

    def predict(self, nodes: int) -> NodesPrediction:
        """Returns the prediction for a number of nodes. Raises UsageError if nothing can be said."""
        if why := self.why_not(nodes):
            raise UsageError(why)
        job, layout = self.job, Layout(nodes, self.job.ranks_per_node)
        now = job.layout
        if layout == now:
            return _prediction(
                job, layout, parts=dict(job.parts), error_s=job.noise * job.step_s, moves=False
            )
        ratio = job.samples(layout) / job.samples(now)
        crossing, crossing_error = _overlap_factor(job, layout)
        computing_s = crossing * job.fixed.scaled(ratio) * job.computing_s
        errors_s = [
            crossing * job.fixed.error * abs(1 - ratio) * job.computing_s,
            math.hypot(COMPUTING, crossing_error) * computing_s,
        ]
        step = self._reductions.step(layout, computing_s=computing_s)
        error = self._reductions.error(layout)
        slow, quick = (
            self._reductions.step(layout, computing_s=computing_s, times=math.exp(by))
            for by in (error, -error)
        )
        errors_s.append((slow.exposed_s - quick.exposed_s) / 2)
        waiting_s = _waiting_s(job, layout, computing_s=computing_s)
        errors_s.append(WAITING * max(waiting_s, job.parts["waiting"]))
        least_input_s, most_input_s = sorted((ratio * job.parts["input"], job.parts["input"]))
        errors_s.append((most_input_s - least_input_s) / 2 / TWO_SIDED_90)
        evaluation_s = job.parts["evaluation"] * now.ranks / layout.ranks
        errors_s += [
            EVALUATION * evaluation_s,
            CONSTANT_PARTS * (job.parts["checkpoint"] + job.parts["other"]),
        ]
        hidden_s = min(computing_s, step.overlapped_s)
        parts = dict.fromkeys(job.parts, 0.0) | {
            "input": (least_input_s + most_input_s) / 2, "compute": computing_s - hidden_s,
            "hidden_reduction": hidden_s, "exposed_reduction": step.exposed_s, "waiting": waiting_s,
            "evaluation": evaluation_s, "checkpoint": job.parts["checkpoint"], "other": job.parts["other"],
        }  # fmt: skip
        errors_s.append(job.noise * sum(parts.values()))
        return _prediction(job, layout, parts=parts, error_s=math.hypot(*errors_s), moves=True)


def _prediction(
    job: MeasuredJob, layout: Layout, *, parts: Mapping[str, float], error_s: float, moves: bool
) -> NodesPrediction:
    step_s, move_s = sum(parts.values()), job.move_s if moves else 0.0
    time_s = move_s + job.steps_left * step_s
    half_s = TWO_SIDED_90 * math.hypot(job.steps_left * error_s, MOVING * move_s)
    return NodesPrediction(
        nodes=layout.nodes, ranks=layout.ranks, parts=parts, step_s=step_s,
        low_s=max(0.0, step_s - TWO_SIDED_90 * error_s), high_s=step_s + TWO_SIDED_90 * error_s,
        time_s=time_s, time_low_s=max(0.0, time_s - half_s), time_high_s=time_s + half_s,
        node_hours=layout.nodes * time_s / 3600,
        energy_j=None if job.watts is None else job.watts * layout.nodes * time_s,
    )  # fmt: skip


def _overlap_factor(job: MeasuredJob, layout: Layout) -> tuple[float, float]:
    """Returns by how much computing is longer because reductions run beside it, and the relative standard error.

    The factor differs from 1 only between one rank, which reduces nothing, and several ranks.
    """
    alone, before = layout.ranks == 1, job.layout.ranks == 1
    if alone == before or job.offloaded or not job.overlap:
        return 1.0, 0.0
    return (1 / OVERLAP if alone else OVERLAP), OVERLAP_ERROR


def _waiting_s(job: MeasuredJob, layout: Layout, *, computing_s: float) -> float:
    """Returns how long a rank waits for slower ranks: what was measured, scaled with the expected slowest rank."""
    expected_s = (slowest_factor(job.sigma, layout.ranks) - 1) * computing_s
    expected_now_s = (slowest_factor(job.sigma, job.layout.ranks) - 1) * job.computing_s
    if expected_now_s <= 0:
        return expected_s if layout.ranks > 1 else 0.0
    return job.parts["waiting"] * expected_s / expected_now_s


def _link_of(job: MeasuredJob) -> MeasuredLink | None:
    """Returns the link between nodes: as measured or given, or the rate that the run's own reductions have reached."""
    if job.link is not None or job.nodes == 1:
        return job.link
    free = machine_of(USUAL | {"link_share": 1.0}, node=Node(cores=1), link_bytes_per_s=INFINITE_RATE)
    sent = sum(
        cost_of(_two_levels(job), bucket.num_bytes, wire=job.wire, layout=job.layout, machine=free).sent_bytes
        for bucket in job.buckets
    )
    seconds = job.parts["exposed_reduction"] + job.parts["hidden_reduction"]
    rate = sent / seconds if seconds > 0 else INFINITE_RATE
    return MeasuredLink(bytes_per_s=rate, latency_s=USUAL["latency_s"], source="the run's own reductions")


def _two_levels(job: MeasuredJob) -> str:
    """Returns the algorithm on other numbers of nodes. One rank reduces nothing, so its algorithm says nothing."""
    return "hierarchical" if job.layout.ranks == 1 else job.algorithm


def _slower(machine: Machine, factor: float) -> Machine:
    """Returns the machine on which every reduction takes `factor` times as long."""
    values = {
        "latency_s": machine.network.latency_s, "message_s": machine.network.per_message_s,
        "engine_message_s": machine.node.engine_message_s, "local_latency_s": machine.local.latency_s,
    }  # fmt: skip
    rates = {
        "local_bytes_per_s": machine.local.bytes_per_s, "sum_bytes_per_s": machine.node.sum_bytes_per_s,
        "code_bytes_per_s": machine.node.code_bytes_per_s, "wire_bytes_per_s": machine.node.wire_bytes_per_s,
    }  # fmt: skip
    scaled = {name: factor * value for name, value in values.items()}
    scaled |= {name: rate / factor for name, rate in rates.items()}
    scaled |= {"turns": machine.network.turns, "engine_turns": machine.node.engine_turns, "link_share": 1.0}
    return machine_of(scaled, node=machine.node, link_bytes_per_s=machine.network.bytes_per_s / factor)
