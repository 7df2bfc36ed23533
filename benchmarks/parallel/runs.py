"""The measurements of each figure, and their sizes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.parallel import figures
from benchmarks.parallel.layouts import LAYOUTS, timed_methods
from benchmarks.parallel.planned.runs import MODELS, QUICK_MODELS, plan_records
from benchmarks.parallel.timed.programs import on_cluster, on_node
from benchmarks.parallel.timed.rounds import Rounds, take_rounds
from benchmarks.reduction.places import OnCluster, OneNode, RanksFailed
from benchmarks.results_file import Record
from benchmarks.starting import Start
from tests.cluster import Cluster, ClusterPlan
from tests.cluster.cluster import CLUSTERS

MODULE = "benchmarks.parallel.ranks"
SEED = 20
EMULATED = "HPCTRAIN_RANKS_PER_NODE"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements. times: nodes and ranks on each that are timed, and the rates of their links; one node
    is this machine. batch: samples of a rank in a timed step."""

    equality_ranks: tuple[int, ...] = (1, 2, 4)
    equality_steps: int = 20
    memory_ranks: tuple[int, ...] = (2, 4)
    memory_workload: str = "50M"
    planned_models: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: MODELS)
    traffic_nodes: int = 4
    traffic_workload: str = "sent"
    traffic_steps: int = 3
    times: Mapping[tuple[int, int], Sequence[str]] = field(
        default_factory=lambda: {
            (1, 2): ("",),
            (4, 1): ("1gbit", "200mbit"),
            (4, 2): ("1gbit", "200mbit"),
        }
    )
    batch: int = 4
    warmup_steps: int = 3
    turn_steps: int = 3
    rounds: int = 9
    checkpoint_ranks: tuple[int, ...] = (4, 2)
    timeout_s: float = 400.0


FULL = Scale()
QUICK = replace(
    FULL, equality_ranks=(2,), memory_ranks=(2,), memory_workload="2M", planned_models=QUICK_MODELS,
    traffic_nodes=2, traffic_workload="2M",
    traffic_steps=1, times={(1, 2): ("",)}, turn_steps=1, rounds=1, checkpoint_ranks=(2,),
)  # fmt: skip
THOROUGH = replace(FULL, equality_ranks=(1, 2, 4, 8))


@dataclass(kw_only=True)
class Places:
    """Where ranks are started. cluster: None where there can be none. starts: how each launch so far was started."""

    cluster: Cluster | None
    say: Say
    starts: list[Start] = field(default_factory=list)

    def on_node(
        self, case: str, settings: Mapping[str, Any], *, num_ranks: int, nodes: int = 1, timeout_s: float
    ) -> Any:
        """Runs a case on this machine. nodes: as which the ranks are treated (emulated nodes)."""
        variables = {} if nodes == 1 else {EMULATED: str(num_ranks // nodes)}
        place = OneNode(num_ranks=num_ranks, module=MODULE, variables=variables)
        found = place.run(case, settings, timeout_s=timeout_s)
        self.starts += place.starts
        return found

    def on_cluster(self, *, ranks_per_node: int, num_nodes: int) -> OnCluster | None:
        if self.cluster is None:
            return None
        return OnCluster(self.cluster, ranks_per_node=ranks_per_node, num_nodes=num_nodes, module=MODULE)


Run = Callable[[Places, Scale], list[Record]]


def equality(places: Places, scale: Scale) -> list[Record]:
    """Figure 1. Several ranks are two emulated nodes, so that every layout has its groups."""
    found = {}
    for num_ranks in scale.equality_ranks:
        nodes = min(2, num_ranks)
        settings = {
            "workloads": ["language", "convolution"], "steps": scale.equality_steps,
            "layouts": [name for name, layout in LAYOUTS.items() if nodes > 1 or not layout.nodes],
        }  # fmt: skip
        found[num_ranks] = places.on_node(
            "equality", settings, num_ranks=num_ranks, nodes=nodes, timeout_s=scale.timeout_s
        )
        places.say(f"equality on {num_ranks} ranks")
    return figures.equality_records(found, steps=scale.equality_steps)


def memory(places: Places, scale: Scale) -> list[Record]:
    """Figure 2. Each layout in processes of its own."""
    made = []
    for num_ranks in scale.memory_ranks:
        for layout in LAYOUTS.values():
            nodes = 2 if layout.nodes else 1
            if num_ranks <= nodes and layout.nodes:
                continue  # nothing is shared within a node
            settings = {"layout": layout.name, "workload": scale.memory_workload}
            found = places.on_node(
                "memory", settings, num_ranks=num_ranks, nodes=nodes, timeout_s=scale.timeout_s
            )
            made.append(figures.memory_record(layout, found, num_ranks=num_ranks, sharing=num_ranks // nodes))
            places.say(f"memory of {layout.what} on {num_ranks} ranks")
    return made


def planned(places: Places, scale: Scale) -> list[Record]:
    """Figure 2, against `hpctrain plan`. Two ranks on this machine."""
    made = plan_records(models=scale.planned_models, timeout_s=scale.timeout_s)
    places.say("memory against the plan")
    return made


def traffic(places: Places, scale: Scale) -> list[Record]:
    """Figure 3. One rank on each node, so that its interface's bytes are the rank's; two for layouts on nodes."""
    made = []
    for ranks_per_node in (1, 2):
        place = places.on_cluster(ranks_per_node=ranks_per_node, num_nodes=scale.traffic_nodes)
        if place is None:
            return []
        place.cluster.set_rate("1gbit")
        layouts = [layout for layout in LAYOUTS.values() if layout.nodes == (ranks_per_node > 1)]
        choices = [(layout, wire) for layout in layouts for wire in layout.wires]
        settings = {
            "workload": scale.traffic_workload, "steps": scale.traffic_steps, "pause_s": 2.0,
            "choices": [(layout.name, wire) for layout, wire in choices],
        }  # fmt: skip
        found = place.run("traffic", settings, timeout_s=scale.timeout_s)
        places.starts += place.starts
        made += [
            figures.traffic_record(
                layout, wire, found, num_nodes=scale.traffic_nodes, ranks_per_node=ranks_per_node,
                steps=scale.traffic_steps,
            )
            for layout, wire in choices
        ]  # fmt: skip
        places.say(f"traffic of {scale.traffic_nodes} x {ranks_per_node} ranks")
    return made


def times(num_nodes: int, ranks_per_node: int) -> Run:
    """Figure 4 at one place."""

    def run(places: Places, scale: Scale) -> list[Record]:
        rates = scale.times.get((num_nodes, ranks_per_node), ())
        methods = timed_methods(several_nodes=num_nodes > 1 and ranks_per_node > 1)
        if num_nodes == 1 and rates:
            with tempfile.TemporaryDirectory() as name:
                found = take_rounds(
                    list(methods.values()), directory=Path(name), num_ranks=ranks_per_node,
                    command=lambda method, folder, number: on_node(method, folder, num_ranks=ranks_per_node),
                    rates={"": lambda: None}, **_of(scale),
                )  # fmt: skip
        elif (place := places.on_cluster(ranks_per_node=ranks_per_node, num_nodes=num_nodes)) and rates:
            cluster = place.cluster
            with tempfile.TemporaryDirectory(dir=cluster.plan.directory) as name:
                found = take_rounds(
                    list(methods.values()), directory=Path(name), num_ranks=num_nodes * ranks_per_node,
                    command=lambda method, folder, number: on_cluster(method, folder, place=place, number=number),
                    rates={rate: lambda rate=rate: cluster.set_rate(rate) for rate in rates},  # type: ignore[misc]
                    **_of(scale),
                )  # fmt: skip
        else:
            return []
        return _records(found, places, num_nodes=num_nodes, ranks_per_node=ranks_per_node)

    return run


def _of(scale: Scale) -> dict[str, Any]:
    settings = {
        "workload": "timed",
        "batch": scale.batch,
        "warmup": scale.warmup_steps,
        "steps": scale.turn_steps,
    }
    return {
        "settings": settings,
        "num_rounds": scale.rounds,
        "seed": SEED,
        "timeout_s": scale.timeout_s,
    }


def _records(found: Rounds, places: Places, *, num_nodes: int, ranks_per_node: int) -> list[Record]:
    places.starts += found.starts
    if found.failed:
        raise RanksFailed("; ".join(f"{name}: {error}" for name, error in found.failed.items()))
    methods = timed_methods(several_nodes=True)
    made = []
    for rate, seconds in found.seconds.items():
        shape = f"{num_nodes}x{ranks_per_node}"
        made += figures.time_records(
            seconds, methods, place=f"{shape}.{rate}" if rate else shape, binds=bool(rate),
            where=f"{num_nodes} x {ranks_per_node} ranks" + (f" at {rate}" if rate else " on one node"),
        )  # fmt: skip
        places.say(f"steps of {shape} ranks {rate}")
    return made


def checkpoints(places: Places, scale: Scale) -> list[Record]:
    """Figure 6. The ranks are two emulated nodes."""
    first = scale.checkpoint_ranks[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": folder, "layouts": list(LAYOUTS)}
        run = {"nodes": 2, "timeout_s": scale.timeout_s}
        saved = places.on_node("save", settings, num_ranks=first, **run)
        loaded = {}
        for num_ranks in scale.checkpoint_ranks:
            loaded[num_ranks] = places.on_node("load", settings, num_ranks=num_ranks, **run)
            places.say(f"checkpoints of {first} ranks loaded on {num_ranks}")
        dcp = places.on_node("dcp", settings, num_ranks=first, **run)
    return [*figures.checkpoint_records(saved, loaded, num_ranks=first), figures.dcp_record(dcp)]


# Figure -> its parts: title and measurement.
FIGURES: dict[str, list[tuple[str, Run]]] = {
    "1": [("equality", equality)],
    "2": [("memory", memory), ("plan", planned)],
    "3": [("traffic", traffic)],
    "4": [
        ("2 ranks on one node", times(1, 2)),
        ("4 nodes of one rank", times(4, 1)),
        ("4 nodes of two ranks", times(4, 2)),
    ],
    "6": [("checkpoints", checkpoints)],
}
# Cores of a node's jobs: every method that is timed has one, and lives until all are.
_CORES_PER_NODE = len(timed_methods(several_nodes=True)) + 1


@contextmanager
def places_for(names: Sequence[str], *, scale: Scale, say: Say, why_not: str | None) -> Iterator[Places]:
    """Yields where the figures `names` are measured. why_not: why there can be no cluster, or None."""
    needs_nodes = any(nodes > 1 for nodes, _ in scale.times)
    if not any(name == "3" or (name == "4" and needs_nodes) for name in names):
        yield Places(cluster=None, say=say)
    elif why_not is not None:
        say(f"no cluster, so only what needs one node is measured: {why_not}")
        yield Places(cluster=None, say=say)
    else:
        plan = ClusterPlan(
            directory=CLUSTERS / f"bench-{os.getpid()}", num_nodes=4, cores_per_node=_CORES_PER_NODE
        )
        with Cluster.up(plan) as cluster:
            yield Places(cluster=cluster, say=say)
