"""What would make a step shorter, in percent: the model is run again with each change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hpctrain.scaling.model.costs import actual_algorithm
from hpctrain.scaling.model.machine import Layout
from hpctrain.scaling.model.predict import Scenario, step_of

WORTH = 0.01  # share of the throughput from which on a change is listed
BUCKETS_BYTES = tuple(float(2**k) for k in range(18, 27))
LOCAL_STEPS = 4


@dataclass(frozen=True, slots=True)
class Advice:
    """A change and what it gains. gain: samples/s with it / samples/s without, minus 1. costs: what has to be
    accepted for it; empty if nothing."""

    change: str
    gain: float
    costs: str = ""


def advice(scenario: Scenario, layout: Layout) -> list[Advice]:
    """Returns the changes that gain at least 1 %, best first."""
    before = _samples_per_s(scenario, layout)
    found = [
        Advice(change, _samples_per_s(changed, layout) / before - 1, costs)
        for change, changed, costs in _changes(scenario, layout)
    ]
    return sorted((one for one in found if one.gain >= WORTH), key=lambda one: -one.gain)


def _samples_per_s(scenario: Scenario, layout: Layout) -> float:
    return scenario.workload.samples / step_of(scenario, layout).step_s


def _changes(scenario: Scenario, layout: Layout) -> Iterator[tuple[str, Scenario, str]]:
    setup, workload, machine = scenario.setup, scenario.workload, scenario.machine
    rounding = {"fp16": "rounding to 16 bits", "int8": "rounding to 8 bits, with error feedback"}
    for wire, costs in rounding.items():
        if wire != setup.wire and not (setup.wire == "int8" and wire == "fp16"):
            yield f"wire = {wire}", replace(scenario, setup=replace(setup, wire=wire)), costs
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
            size, best = min((make() for make in sizes), key=lambda pair: step_of(pair[1], layout).step_s)
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
            "another algorithm of training; hpctrain has none",
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
