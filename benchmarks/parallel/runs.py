"""The measurements of each figure."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parallel import figures
from benchmarks.parallel.layouts import LAYOUTS, arrangements, of_figure
from benchmarks.parallel.planned.runs import plan_records
from benchmarks.parallel.scale import Scale
from benchmarks.parallel.timed.methods import (
    METHODS,
    OPTIMIZERS,
    OPTIMIZERS_IN_TURNS,
    Method,
    in_turns,
    methods_at,
)
from benchmarks.parallel.timed.programs import Turn, on_cluster, on_node
from benchmarks.parallel.timed.rounds import Rounds, TurnTaking, take_rounds
from benchmarks.places import OnCluster, OneNode, RanksFailed
from benchmarks.results_file import Record
from benchmarks.starting import Start
from tests.cluster import Cluster, ClusterError, ClusterPlan
from tests.cluster.cluster import CLUSTERS

MODULE = "benchmarks.parallel.ranks"
SEED = 20
EMULATED = "HPCTRAIN_RANKS_PER_NODE"
FORWARD_S, BACKWARD_S = 0.02, 0.04  # of a rank and micro-batch, in figure 5
Say = Callable[[str], None]


@dataclass(kw_only=True)
class Places:
    """Where ranks are started. cluster: None where there can be none. no_cluster: why it could not be brought up where
    there can be one. starts: how each launch so far was started. failed: what could not be measured so far."""

    cluster: Cluster | None
    say: Say
    no_cluster: str = ""
    starts: list[Start] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Adds `what` to `failed` if ranks fail in the `with` block, so that the others are still measured."""
        try:
            yield
        except RanksFailed as error:
            self.failed.append(what)
            self.say(f"{what}: failed\n{error}")

    def on_node(
        self, case: str, settings: Mapping[str, Any], *, num_ranks: int, nodes: int = 1, timeout_s: float
    ) -> Any:
        """Runs a case on this machine. nodes: as which the ranks are treated (emulated nodes)."""
        variables = {} if nodes == 1 else {EMULATED: str(num_ranks // nodes)}
        place = OneNode(MODULE, num_ranks=num_ranks, variables=variables)
        found = place.run(case, settings, timeout_s=timeout_s)
        self.starts += place.starts
        return found

    def on_cluster(self, *, ranks_per_node: int, num_nodes: int) -> OnCluster | None:
        if self.no_cluster:
            raise RanksFailed(f"no cluster: {self.no_cluster}")
        if self.cluster is None:
            return None
        return OnCluster(MODULE, self.cluster, ranks_per_node=ranks_per_node, num_nodes=num_nodes)


Part = Callable[[Places, Scale], list[Record]]


def equality(places: Places, scale: Scale) -> list[Record]:
    """Figure 1. The ranks are two emulated nodes, so that layouts have groups of both axes; one for those that do not
    fit there."""
    found: dict[int, list[Any]] = {}
    for num_ranks in scale.equality_ranks:
        for num_nodes, names in arrangements(of_figure("1"), num_ranks=num_ranks).items():
            apart = [name for name in names if LAYOUTS[name].is_apart]
            for together in [[name for name in names if name not in apart], *([name] for name in apart)]:
                settings = {
                    "workloads": ["language", "convolution"], "steps": scale.equality_steps, "layouts": together,
                }  # fmt: skip
                what = f"equality of {len(together)} layouts on {num_nodes} x {num_ranks // num_nodes} ranks"
                with places.attempt(what):
                    found.setdefault(num_ranks, []).append(
                        places.on_node(
                            "equality",
                            settings,
                            num_ranks=num_ranks,
                            nodes=num_nodes,
                            timeout_s=scale.timeout_s,
                        )
                    )
                    places.say(what)
    return figures.equality_records(found, steps=scale.equality_steps)


def memory(places: Places, scale: Scale) -> list[Record]:
    """Figure 2. Each layout in processes of its own."""
    made = []
    for num_ranks in scale.memory_ranks:
        for layout in of_figure("2"):
            num_nodes = 2 if layout.nodes else 1
            enough = num_nodes == 1 or num_ranks // num_nodes >= layout.ranks_per_node
            if not (enough and layout.fits(num_ranks=num_ranks, num_nodes=num_nodes)):
                continue
            settings = {"layout": layout.name, "workload": scale.memory_workload}
            what = f"memory of {layout.what} on {num_ranks} ranks"
            with places.attempt(what):
                found = places.on_node(
                    "memory", settings, num_ranks=num_ranks, nodes=num_nodes, timeout_s=scale.timeout_s
                )
                sharing = num_ranks // num_nodes
                made.append(figures.memory_record(layout, found, num_ranks=num_ranks, sharing=sharing))
                places.say(what)
    return made


def planned(places: Places, scale: Scale) -> list[Record]:
    """Figure 2, against `hpctrain plan`. Two ranks on this machine."""
    made = plan_records(models=scale.planned_models, timeout_s=scale.timeout_s, attempt=places.attempt)
    places.say("memory against the plan")
    return made


def traffic(places: Places, scale: Scale) -> list[Record]:
    """Figure 3. One rank on each node, so that its interface's bytes are the rank's; two for layouts that need them."""
    made = []
    num_nodes = scale.traffic_nodes
    for ranks_per_node in (1, 2):
        place = places.on_cluster(ranks_per_node=ranks_per_node, num_nodes=num_nodes)
        if place is None:
            return []
        place.cluster.set_rate("1gbit")
        layouts = [
            layout
            for layout in of_figure("3")
            if layout.ranks_per_node == ranks_per_node
            and layout.fits(num_ranks=num_nodes * ranks_per_node, num_nodes=num_nodes)
        ]
        choices = [(layout, wire) for layout in layouts for wire in layout.wires]
        settings = {
            "workload": scale.traffic_workload, "steps": scale.traffic_steps, "pause_s": 2.0,
            "choices": [(layout.name, wire) for layout, wire in choices],
        }  # fmt: skip
        what = f"traffic of {num_nodes} x {ranks_per_node} ranks"
        with places.attempt(what):
            found = place.run("traffic", settings, timeout_s=scale.timeout_s)
            places.starts += place.starts
            made += [
                figures.traffic_record(
                    layout, wire, found, num_nodes=num_nodes, ranks_per_node=ranks_per_node,
                    steps=scale.traffic_steps,
                )
                for layout, wire in choices
            ]  # fmt: skip
            places.say(what)
    return made


def times(num_nodes: int, ranks_per_node: int) -> Part:
    """Figure 4 at one place."""

    def run(places: Places, scale: Scale) -> list[Record]:
        at = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node}
        found = _in_turns(places, scale, in_turns(methods_at(**at)), **at)
        made = []
        for turns, seconds, where in _by_rate(found, places, **at):
            exposed = {
                name: [turn.exposed_s for turn in of_method if turn.exposed_s is not None]
                for name, of_method in turns.items()
                if METHODS[name].layout is not None
            }
            made += figures.time_records(seconds, METHODS, **where)
            made += figures.exposed_records(exposed, place=where["place"], where=where["where"])
        return made

    return run


def optimizers(num_nodes: int, ranks_per_node: int) -> Part:
    """Figure 7 at one place."""

    def run(places: Places, scale: Scale) -> list[Record]:
        at = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node}
        found = _in_turns(places, scale, OPTIMIZERS_IN_TURNS, **at)
        return [
            record
            for _, seconds, where in _by_rate(found, places, **at)
            for record in figures.horovod_records(seconds, OPTIMIZERS, **where)
        ]

    return run


def _in_turns(
    places: Places, scale: Scale, groups: Sequence[Sequence[Method]], *, num_nodes: int, ranks_per_node: int
) -> Rounds:
    """Has methods take turns at one place, at each rate that `scale` names for it."""
    rates = scale.times.get((num_nodes, ranks_per_node), ())
    if num_nodes == 1 and rates:
        with tempfile.TemporaryDirectory() as name:
            turns = TurnTaking(
                directory=Path(name), num_ranks=ranks_per_node,
                command=lambda method, folder, number: on_node(method, folder, num_ranks=ranks_per_node),
                rates={"": lambda: None}, **_of(scale),
            )  # fmt: skip
            return take_rounds(groups, turns)
    if rates and (place := places.on_cluster(ranks_per_node=ranks_per_node, num_nodes=num_nodes)):
        cluster = place.cluster
        with tempfile.TemporaryDirectory(dir=cluster.plan.directory) as name:
            turns = TurnTaking(
                directory=Path(name), num_ranks=num_nodes * ranks_per_node,
                command=lambda method, folder, number: on_cluster(method, folder, place=place, number=number),
                rates={rate: lambda rate=rate: cluster.set_rate(rate) for rate in rates},  # type: ignore[misc]
                **_of(scale),
            )  # fmt: skip
            return take_rounds(groups, turns)
    return Rounds()


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
        "timeout_s": scale.turn_timeout_s,
        "idle_s": scale.timeout_s,
    }


def _by_rate(
    found: Rounds, places: Places, *, num_nodes: int, ranks_per_node: int
) -> Iterator[tuple[dict[str, list[Turn]], dict[str, list[float]], dict[str, Any]]]:
    """Yields for each rate the turns, the seconds of a step of each round, and the place as `time_records` takes it.

    Adds to `places` what failed, and how ranks were started."""
    places.starts += found.starts
    for name, error in found.failed.items():
        places.failed.append(name)
        places.say(f"{name}: failed\n{error}")
    for rate, turns in found.turns.items():
        shape = f"{num_nodes}x{ranks_per_node}"
        where = {
            "place": f"{shape}.{rate}" if rate else shape,
            "where": f"{num_nodes} x {ranks_per_node} ranks" + (f" at {rate}" if rate else " on one node"),
            "binds": bool(rate),
        }
        yield turns, {name: [turn.step_s for turn in of_method] for name, of_method in turns.items()}, where
        places.say(f"steps of {shape} ranks {rate}")


def bubble(places: Places, scale: Scale) -> list[Record]:
    """Figure 5. The ranks sleep where they would compute, so they need no cores of their own."""
    sleeps = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S}
    settings = {
        "micro_batches": scale.bubble_micro_batches, "message_bytes": scale.bubble_message_bytes,
        "steps": scale.bubble_steps, **sleeps,
    }  # fmt: skip
    found = places.on_node("bubble", settings, num_ranks=scale.bubble_ranks, timeout_s=scale.timeout_s)
    return figures.bubble_records(found, num_ranks=scale.bubble_ranks)


def checkpoints(places: Places, scale: Scale) -> list[Record]:
    """Figure 6. The ranks are arranged as for figure 1."""
    first = scale.checkpoint_ranks[0]
    with tempfile.TemporaryDirectory() as folder:
        saved: dict[str, list[float]] = {}
        for num_nodes, names in arrangements(of_figure("6"), num_ranks=first).items():
            settings = {"folder": folder, "layouts": names}
            with places.attempt(f"checkpoints saved on {num_nodes} x {first // num_nodes} ranks"):
                saved |= places.on_node(
                    "save", settings, num_ranks=first, nodes=num_nodes, timeout_s=scale.timeout_s
                )
        loaded: dict[int, dict[str, Any]] = {}
        for num_ranks in scale.checkpoint_ranks:
            loaded[num_ranks] = {}
            for num_nodes, names in arrangements(of_figure("6"), num_ranks=num_ranks).items():
                settings = {"folder": folder, "layouts": names, "saved": list(saved)}
                with places.attempt(f"checkpoints loaded on {num_nodes} x {num_ranks // num_nodes} ranks"):
                    loaded[num_ranks] |= places.on_node(
                        "load", settings, num_ranks=num_ranks, nodes=num_nodes, timeout_s=scale.timeout_s
                    )
            places.say(f"{len(loaded[num_ranks])} pairs: checkpoints of {first} ranks loaded on {num_ranks}")
        settings = {"folder": folder, "layouts": list(saved)}
        made = figures.checkpoint_records(saved, loaded, num_ranks=first)
        with places.attempt("torch DCP"):
            dcp = places.on_node("dcp", settings, num_ranks=first, timeout_s=scale.timeout_s)
            made.append(figures.dcp_record(dcp))
    return made


# Figure -> its parts: title and measurement.
FIGURES: dict[str, list[tuple[str, Part]]] = {
    "1": [("equality", equality)],
    "2": [("memory", memory), ("plan", planned)],
    "3": [("traffic", traffic)],
    "4": [
        ("2 ranks on one node", times(1, 2)),
        ("4 nodes of one rank", times(4, 1)),
        ("4 nodes of two ranks", times(4, 2)),
    ],
    "5": [("bubble", bubble)],
    "6": [("checkpoints", checkpoints)],
    "7": [
        ("2 ranks on one node", optimizers(1, 2)),
        ("4 nodes of one rank", optimizers(4, 1)),
    ],
}
# Cores of a node's jobs: every method that is timed has one, and lives until all are.
_CORES_PER_NODE = len(METHODS) + 1


@contextmanager
def places_for(names: Sequence[str], *, scale: Scale, say: Say, why_not: str | None) -> Iterator[Places]:
    """Yields where the figures `names` are measured. why_not: why there can be no cluster, or None."""
    needs_nodes = any(nodes > 1 for nodes, _ in scale.times)
    if not any(name == "3" or (name in ("4", "7") and needs_nodes) for name in names):
        yield Places(cluster=None, say=say)
    elif why_not is not None:
        say(f"no cluster, so only what needs one node is measured: {why_not}")
        yield Places(cluster=None, say=say)
    else:
        plan = ClusterPlan(
            directory=CLUSTERS / f"bench-{os.getpid()}", num_nodes=4, cores_per_node=_CORES_PER_NODE
        )
        with ExitStack() as stack:
            try:
                places = Places(cluster=stack.enter_context(Cluster.up(plan)), say=say)
            except (ClusterError, OSError, subprocess.SubprocessError) as error:
                say(f"the cluster could not be brought up: {error}")
                places = Places(cluster=None, no_cluster=str(error), say=say)
            yield places
