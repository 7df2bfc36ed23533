"""Predicts the time of a step and the efficiency for any layout, and names the limiting resource. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpctrain.errors import UsageError
from hpctrain.scaling.model.costs import Cost, cost_of
from hpctrain.scaling.model.machine import Layout, Machine
from hpctrain.scaling.model.workload import Workload, slowest_factor

# When the last bucket is reduced: a recurrence of maxima and sums over the buckets of a step. Pure.
#
# Of a max-plus system (Baccelli, Cohen, Olsder and Quadrat 1992, Synchronization and Linearity): a
# reduction begins when its bucket is ready, the one before it has left the resource that both need most,
# and no more than `in_flight` are under way.


IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Times of a step's reductions, in seconds.

    end_s: time from the start of backward to the end of the last reduction. busy_s: time during which at least one
    reduction is in flight.
    """

    end_s: float
    busy_s: float


def reduce_during(ready_s: Sequence[float], costs: Sequence[Cost], *, in_flight: int = IN_FLIGHT) -> Overlap:
    """Returns the times of a step's reductions. The buckets are reduced in the given order.

    ready_s: when each bucket is complete, in seconds after the start of backward. costs: the cost of each reduction.
    """
    free_s = 0.0
    ends: list[float] = []
    busy_s, busy_until = 0.0, 0.0
    for number, (ready, cost) in enumerate(zip(ready_s, costs, strict=True)):
        begin = max(ready, free_s, ends[number - in_flight] if number >= in_flight else 0.0)
        occupied = cost.occupied_s if in_flight > 1 else cost.total_s
        free_s = begin + occupied
        # Reductions end in the order in which they began, as they share their resources.
        ends.append(max(begin + cost.total_s, ends[-1] if ends else 0.0))
        busy_s += max(0.0, ends[-1] - max(begin, busy_until))
        busy_until = ends[-1]
    return Overlap(end_s=ends[-1] if ends else 0.0, busy_s=busy_s)


def reduce_fused(
    ready_s: Sequence[float],
    sizes: Sequence[float],
    cost: Callable[[float], Cost],
    *,
    fusion_bytes: float,
    cycle_s: float,
) -> Overlap:
    """Returns the times of a step's reductions with Horovod's Tensor Fusion.

    At the end of each cycle of `cycle_s` seconds, the gradients that are ready are joined, up to `fusion_bytes`, and
    reduced. One reduction runs at a time; a gradient above `fusion_bytes` is reduced alone. ready_s: when each gradient
    is complete, in seconds after the start of backward. sizes: bytes of each gradient. cost: function that returns the
    cost of reducing a number of bytes. Source: docs/tensor-fusion.rst of Horovod.
    """
    now = busy_s = 0.0
    place = 0
    while place < len(sizes):
        now = max(now, ready_s[place])
        now = cycle_s * -(-now // cycle_s) if cycle_s > 0 else now
        end, joined = place, 0.0
        while (
            end < len(sizes) and ready_s[end] <= now and (end == place or joined + sizes[end] <= fusion_bytes)
        ):
            joined += sizes[end]
            end += 1
        seconds = cost(joined).total_s
        now, busy_s, place = now + seconds, busy_s + seconds, end
    return Overlap(end_s=now, busy_s=busy_s)


# Predicts the time of a step and the efficiency for any layout, and names the resource that limits it.


VOTE_BYTES = 64.0  # loss and votes of a step, in one sum at its end
BINDS_FROM = 0.02  # a resource limits the step if the step would be shorter by at least this share without it


@dataclass(frozen=True, slots=True)
class Fusion:
    """Horovod's own fusion: every `cycle_s` seconds Horovod joins the gradients that are ready, up to `num_bytes`."""

    num_bytes: float
    cycle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a run communicates.

    overlap: False if the reduction starts after backward. in_flight: largest number of reductions at the same time.
    local_steps: number of steps between two averages of the parameters (local SGD); 1: every step reduces gradients.
    fusion: Horovod's fusion of gradients; None: the buckets of the workload are reduced.
    """

    algorithm: str = "hierarchical"
    wire: str = "fp32"
    overlap: bool = True
    in_flight: int = IN_FLIGHT
    local_steps: int = 1
    fusion: Fusion | None = None

    def __post_init__(self) -> None:
        if self.local_steps < 1 or self.in_flight < 1:
            raise UsageError(
                f"local_steps = {self.local_steps}, in_flight = {self.in_flight}: each must be at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The storage of the data. bytes_per_s: reading rate of all nodes together; infinite for storage on the nodes."""

    bytes_per_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a prediction depends on, except the number of nodes and ranks."""

    machine: Machine
    workload: Workload
    setup: Setup = Setup()
    storage: Storage = Storage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The predicted time of a step and its parts, in seconds.

    compute_s: computation of the slowest rank, as slowed down by other work on its cores. exposed_s: time for which
    that rank waits for reductions. overlapped_s: time of reductions that run during computation.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    overlapped_s: float
    input_s: float
    checkpoint_s: float


def step_seconds(scenario: Scenario, layout: Layout) -> Step:
    """Returns the predicted time of a step on the nodes and ranks of `layout`."""
    workload, setup = scenario.workload, scenario.setup
    machine = _slowest_links(scenario.machine, layout)
    # On one node whose ranks use every core, hpctrain reduces after backward.
    node = machine.node
    full = layout.nodes == 1 and node.threads * layout.ranks_per_node >= node.cores and not node.offloaded
    after = setup.local_steps > 1 or not setup.overlap or full
    if layout.ranks > 1 and not after:
        workload = workload.with_slower_computation(workload.overlap_slowdown)
    factor = _compute_factor(machine, workload, layout) * slowest_factor(workload.sigma, layout.ranks)
    forward_s, backward_s = factor * workload.forward_s, factor * workload.backward_s
    update_s = factor * workload.update_s
    compute_s = forward_s + backward_s

    def cost(num_bytes: float) -> Cost:
        return cost_of(setup.algorithm, num_bytes, wire=setup.wire, layout=layout, machine=machine)

    vote = cost_of("flat", VOTE_BYTES, wire="fp32", layout=layout, machine=machine)
    costs = [cost(bucket.num_bytes) for bucket in workload.buckets]
    ready_s = [backward_s * (1.0 if after else bucket.ready) for bucket in workload.buckets]
    reduced = _reduced(scenario, ready_s, costs, cost)
    exposed_s = max(0.0, reduced.end_s - backward_s)
    waits_s = exposed_s + vote.total_s
    if not after:
        # Computation and reduction share the cores: no step is shorter than all of their work, and backward is longer
        # by the work of what is reduced meanwhile.
        comm_s = sum(c.cpu_s for c in costs)
        meanwhile = 1 - exposed_s / reduced.busy_s if reduced.busy_s > 0 else 0.0
        own_s = compute_s + update_s
        longer_s = max(0.0, _cores_s(machine, workload, layout, comm_s=meanwhile * comm_s) - own_s)
        waits_s = max(waits_s + longer_s, _cores_s(machine, workload, layout, comm_s=comm_s) - own_s)
    waits_s /= setup.local_steps
    reading_s = layout.ranks * workload.input_bytes / scenario.storage.bytes_per_s
    input_s = max(workload.input_s, reading_s - compute_s - waits_s - update_s)
    return Step(
        step_s=compute_s + waits_s + update_s + input_s + workload.checkpoint_s,
        compute_s=compute_s + update_s,
        exposed_s=waits_s,
        overlapped_s=max(0.0, reduced.busy_s - max(0.0, reduced.end_s - backward_s)) / setup.local_steps,
        input_s=input_s,
        checkpoint_s=workload.checkpoint_s,
    )


def predicted_efficiency(scenario: Scenario, layout: Layout, step: Step) -> float:
    """Returns the samples/s per rank, divided by the samples/s of one rank alone on the machine."""
    return step_seconds(scenario, Layout(1, 1)).step_s / step.step_s


def binding(scenario: Scenario, layout: Layout) -> tuple[str, float]:
    """Returns the resource that limits the step, and the share of the step that would be saved without this limit.

    Each resource is made infinitely fast in turn, and the step is predicted again; the resource that saves most is
    returned. If no resource would save at least 2 %, the result is `computation` with a share of 0.
    """
    before = step_seconds(scenario, layout).step_s
    saved = {
        name: 1 - step_seconds(without(scenario), layout).step_s / before
        for name, without in RESOURCES.items()
    }
    name = max(saved, key=lambda key: saved[key])
    return (name, saved[name]) if saved[name] >= BINDS_FROM else ("computation", 0.0)


def _reduced(
    scenario: Scenario, ready_s: list[float], costs: list[Cost], cost: Callable[[float], Cost]
) -> Overlap:
    setup = scenario.setup
    if setup.fusion is None or not setup.overlap:
        return reduce_during(ready_s, costs, in_flight=setup.in_flight)
    sizes = [bucket.num_bytes for bucket in scenario.workload.buckets]
    return reduce_fused(
        ready_s, sizes, cost, fusion_bytes=setup.fusion.num_bytes, cycle_s=setup.fusion.cycle_s
    )


def _slowest_links(machine: Machine, layout: Layout) -> Machine:
    """Returns the machine with the rate of the slowest of the nodes' links, which limits an all-reduce."""
    factor = slowest_factor(machine.network.sigma, layout.nodes)
    return machine.with_rate(machine.network.bytes_per_s / factor)


def _compute_factor(machine: Machine, workload: Workload, layout: Layout) -> float:
    """Returns the time of computation divided by that of one rank alone on the machine."""
    node = machine.node
    if node.offloaded:
        return 1.0
    wanted = node.threads * layout.ranks_per_node * min(layout.nodes, node.cores_shared_by)
    busy = (
        min(1.0, (wanted - node.threads) / max(1, node.cores - node.threads))
        if wanted > node.threads
        else 0.0
    )
    return max(1.0, wanted / node.cores) * (1 + busy * (workload.busy_slowdown - 1))


def _cores_s(machine: Machine, workload: Workload, layout: Layout, *, comm_s: float) -> float:
    """Returns the seconds that all cores need for the step's work.

    comm_s: processor seconds of each rank's reductions, as lengthened by `Machine.oversubscription`.
    """
    node = machine.node
    if node.offloaded:
        return 0.0
    ranks = layout.ranks_per_node * min(layout.nodes, node.cores_shared_by)
    busy = _compute_factor(machine, workload, layout) / max(1.0, node.threads * ranks / node.cores)
    comm_s /= machine.oversubscription(layout)
    return ranks * (node.threads * busy * workload.compute_s + comm_s) / node.cores


def _no_bandwidth_limit(scenario: Scenario) -> Scenario:
    return replace(scenario, machine=scenario.machine.with_rate(float("inf")))


def _no_latency(scenario: Scenario) -> Scenario:
    machine = scenario.machine
    network = replace(machine.network, latency_s=0.0, per_message_s=0.0)
    return replace(scenario, machine=replace(machine, network=network))


def _no_crowd(scenario: Scenario) -> Scenario:
    """Returns the scenario with enough cores for ranks and reductions; sums, conversions and copies take no time."""
    node = replace(
        scenario.machine.node, cores=1 << 40, sum_bytes_per_s=float("inf"), code_bytes_per_s=float("inf"),
        wire_bytes_per_s=float("inf"),
    )  # fmt: skip
    workload = replace(scenario.workload, busy_slowdown=1.0, overlap_slowdown=1.0)
    return replace(scenario, machine=replace(scenario.machine, node=node), workload=workload)


def _no_stragglers(scenario: Scenario) -> Scenario:
    machine = scenario.machine
    return replace(
        scenario, workload=replace(scenario.workload, sigma=0.0),
        machine=replace(machine, network=replace(machine.network, sigma=0.0)),
    )  # fmt: skip


RESOURCES: dict[str, Callable[[Scenario], Scenario]] = {
    "network bandwidth": _no_bandwidth_limit,
    "network latency": _no_latency,
    "processor cores": _no_crowd,
    "stragglers": _no_stragglers,
    "reading": lambda s: replace(s, storage=Storage(), workload=replace(s.workload, input_s=0.0)),
    "checkpoints": lambda s: replace(s, workload=replace(s.workload, checkpoint_s=0.0)),
}
