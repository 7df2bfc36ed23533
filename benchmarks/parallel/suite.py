"""Split models against one rank, formulas and torch's peers: equality, memory, traffic, time, bubbles and checkpoints;
Horovod scripts on hpctrain against Horovod."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bench, Part, Suite
from benchmarks.parallel import figures
from benchmarks.parallel.layouts import LAYOUTS, arrangements, of_figure
from benchmarks.parallel.timed import (
    METHODS,
    OPTIMIZERS,
    OPTIMIZERS_IN_TURNS,
    Command,
    Method,
    Rounds,
    Turn,
    TurnTaking,
    in_turns,
    methods_at,
    on_cluster,
    on_node,
    take_rounds,
)
from benchmarks.parallel.training import VOCABULARY
from benchmarks.places import OnCluster, run_checked
from benchmarks.results_file import Record
from benchmarks.starting import LAUNCH, user_environment
from hpctrain.data import pack_arrays
from hpctrain.run import parse_recipe, plan_memory, to_toml

MODULE = "benchmarks.parallel.ranks"
SEED = 20
EMULATED = "HPCTRAIN_RANKS_PER_NODE"
FORWARD_S, BACKWARD_S = 0.02, 0.04  # of a rank and micro-batch, in figure 5
# Cores of a node's jobs: every method that is timed has one, and lives until all are.
CORES_PER_NODE = len(METHODS) + 1
PLANNED_RANKS = 2
PLANNED_STEPS = 4
PLANNED_SAMPLES = 64
# By name of the way, as the plan has it: the section [parallel].
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, selective": {"activation_checkpointing": "selective"},
    "none, blocks": {"activation_checkpointing": "blocks"},
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "parameters": {"shard": "parameters"},
    "parameters, blocks": {"shard": "parameters", "activation_checkpointing": "blocks"},
    "none, tensor 2": {"tensor": 2},
    "pipeline 2 1f1b": {"pipeline": 2, "schedule": "1f1b", "micro_batches": 8},
    "pipeline 2 interleaved": {"pipeline": 2, "schedule": "interleaved", "micro_batches": 8},
}
# Options of the task. The small model's memory is what any training needs besides, and is taken off both sides.
MODELS: dict[str, dict[str, int]] = {
    "small": {"window": 64, "width": 64, "layers": 4},
    "large": {"window": 64, "width": 512, "layers": 16},
}
QUICK_MODELS: dict[str, dict[str, int]] = {**MODELS, "large": {"window": 64, "width": 256, "layers": 4}}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements.

    traffic_nodes: number of nodes of the cluster, each with one or two ranks. times: (nodes, ranks per node) that are
    timed, and the rates of their links; one node is this machine. batch: samples of a rank in a timed step. rounds:
    number of rounds of timed turns, each of `turn_steps` steps. bubble_*: settings of the stages that sleep, on
    `bubble_ranks` ranks of one node. checkpoint_ranks: numbers of ranks that load; the first of them also saves.
    timeout_s: time limit of a launch. turn_timeout_s: time limit of the start of a timed method, and of a turn.
    """

    equality_ranks: tuple[int, ...] = (1, 2, 4, 8)
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
    turn_steps: int = 2
    rounds: int = 5
    bubble_ranks: int = 4
    bubble_micro_batches: tuple[int, ...] = (8, 16)
    bubble_message_bytes: tuple[int, ...] = (1 << 10, 1 << 20)
    bubble_steps: int = 3
    checkpoint_ranks: tuple[int, ...] = (4, 2)
    timeout_s: float = 600.0
    turn_timeout_s: float = 240.0


FULL = Scale()
QUICK = replace(
    FULL, equality_ranks=(2,), equality_steps=5, memory_ranks=(2,), memory_workload="3M",
    planned_models=QUICK_MODELS, traffic_nodes=2,
    traffic_workload="3M", traffic_steps=1, times={(1, 2): ("",)}, turn_steps=1, rounds=1, bubble_ranks=2,
    bubble_micro_batches=(4,), bubble_message_bytes=(1 << 10,), bubble_steps=1, checkpoint_ranks=(2,),
)  # fmt: skip

Measure = Callable[[Bench], list[Record]]


def _on_node(
    bench: Bench, case: str, settings: Mapping[str, Any], *, num_ranks: int, num_nodes: int = 1
) -> Any:
    """Runs a case on this machine. num_nodes: as which the ranks are treated (emulated nodes)."""
    variables = {} if num_nodes == 1 else {EMULATED: str(num_ranks // num_nodes)}
    place = bench.one_node(MODULE, num_ranks=num_ranks, variables=variables)
    return place.run(case, settings, timeout_s=bench.scale.timeout_s)


def _on_cluster(bench: Bench, **more: Any) -> OnCluster:
    bench.cluster(cores_per_node=CORES_PER_NODE)
    return bench.on_cluster(MODULE, **more)


def equality(bench: Bench) -> list[Record]:
    """Measures figure 1 on two emulated nodes, so that layouts have groups on both axes; layouts that do not fit there
    run on one node."""
    found: dict[int, list[Any]] = {}
    steps = bench.scale.equality_steps
    for num_ranks in bench.scale.equality_ranks:
        for num_nodes, names in arrangements(of_figure("1"), num_ranks=num_ranks).items():
            apart = [name for name in names if LAYOUTS[name].is_apart]
            for together in [[name for name in names if name not in apart], *([name] for name in apart)]:
                settings = {"workloads": ["language", "convolution"], "steps": steps, "layouts": together}
                shape = f"{num_nodes} x {num_ranks // num_nodes}"
                with bench.attempt(f"equality of {len(together)} layouts on {shape} ranks"):
                    at = {"num_ranks": num_ranks, "num_nodes": num_nodes}
                    found.setdefault(num_ranks, []).append(_on_node(bench, "equality", settings, **at))
    return figures.equality_records(found, steps=steps)


def memory(bench: Bench) -> list[Record]:
    """Measures figure 2, each layout in separate processes."""
    made = []
    for num_ranks in bench.scale.memory_ranks:
        for layout in of_figure("2"):
            num_nodes = 2 if layout.nodes else 1
            enough = num_nodes == 1 or num_ranks // num_nodes >= layout.ranks_per_node
            if not (enough and layout.fits(num_ranks=num_ranks, num_nodes=num_nodes)):
                continue
            settings = {"layout": layout.name, "workload": bench.scale.memory_workload}
            with bench.attempt(f"memory of {layout.what} on {num_ranks} ranks"):
                found = _on_node(bench, "memory", settings, num_ranks=num_ranks, num_nodes=num_nodes)
                sharing = num_ranks // num_nodes
                made.append(figures.memory_record(layout, found, num_ranks=num_ranks, sharing=sharing))
    return made


def planned(bench: Bench) -> list[Record]:
    """Measures figure 2: the growth from the small to the large model, compared with that of `hpctrain plan`."""
    made, models = [], bench.scale.planned_models
    folder = bench.folder("plan")
    tokens = np.random.default_rng(0).integers(
        VOCABULARY, size=(PLANNED_SAMPLES, models["large"]["window"] + 1)
    )
    pack_arrays(folder / "data", {"tokens": tokens.astype(np.uint8)})
    for way, parallel in WAYS.items():
        measured, expected = {}, {}
        with bench.attempt(way):
            for model, options in models.items():
                document = recipe_of(options, parallel, data=folder / "data")
                found = plan_memory(
                    parse_recipe(document), recipe_path=folder / "recipe.toml", num_ranks=PLANNED_RANKS
                )
                chosen = next(entry for entry in found.ways if entry.is_current)
                assert chosen.needs is not None, chosen.refused
                expected[model] = chosen.needs(chosen.choices[0]).total
                where = Path(tempfile.mkdtemp(dir=folder))
                measured[model] = _trained(document, where, timeout_s=bench.scale.timeout_s)
            made.append(
                figures.plan_record(way, measured=measured, planned=expected, num_ranks=PLANNED_RANKS)
            )
    return made


def traffic(bench: Bench) -> list[Record]:
    """Measures figure 3 with one rank per node, whose interface counts its bytes; two if a layout needs them."""
    made = []
    num_nodes, steps = bench.scale.traffic_nodes, bench.scale.traffic_steps
    for ranks_per_node in (1, 2):
        place = _on_cluster(bench, rate="1gbit", ranks_per_node=ranks_per_node, num_nodes=num_nodes)
        choices = [
            (layout, wire)
            for layout in of_figure("3")
            if layout.ranks_per_node == ranks_per_node
            and layout.fits(num_ranks=num_nodes * ranks_per_node, num_nodes=num_nodes)
            for wire in layout.wires
        ]
        settings = {
            "workload": bench.scale.traffic_workload, "steps": steps, "pause_s": 2.0,
            "choices": [(layout.name, wire) for layout, wire in choices],
        }  # fmt: skip
        at = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node}
        with bench.attempt(f"traffic of {num_nodes} x {ranks_per_node} ranks"):
            found = place.run("traffic", settings, timeout_s=bench.scale.timeout_s)
            made += [
                figures.traffic_record(layout, wire, found, **at, steps=steps) for layout, wire in choices
            ]
    return made


def times(num_nodes: int, ranks_per_node: int) -> Measure:
    """Returns the measurement of figure 4 on these nodes and ranks."""
    at = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node}

    def measure(bench: Bench) -> list[Record]:
        made = []
        for turns, seconds, where in _by_rate(bench, in_turns(methods_at(**at)), **at):
            exposed = {
                name: [turn.exposed_s for turn in of_method if turn.exposed_s is not None]
                for name, of_method in turns.items()
                if METHODS[name].layout is not None
            }
            made += figures.time_records(seconds, METHODS, **where)
            made += figures.exposed_records(exposed, place=where["place"], where=where["where"])
        return made

    return measure


def optimizers(num_nodes: int, ranks_per_node: int) -> Measure:
    """Returns the measurement of figure 7 on these nodes and ranks."""
    at = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node}

    def measure(bench: Bench) -> list[Record]:
        every = _by_rate(bench, OPTIMIZERS_IN_TURNS, **at)
        return [
            record
            for _, seconds, where in every
            for record in figures.horovod_records(seconds, OPTIMIZERS, **where)
        ]

    return measure


def _by_rate(
    bench: Bench, groups: Sequence[Sequence[Method]], *, num_nodes: int, ranks_per_node: int
) -> Iterator[tuple[dict[str, list[Turn]], dict[str, list[float]], dict[str, Any]]]:
    """Has methods take turns at one place. Yields, for each rate that the scale names for it, the turns, the seconds of
    a step of each round, and the place as `time_records` takes it."""
    found = _in_turns(bench, groups, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    bench.starts += found.starts
    for name, error in found.failed.items():
        bench.failed.append(name)
        bench.say(f"{name}: failed\n{error}")
    for rate, turns in found.turns.items():
        shape = f"{num_nodes}x{ranks_per_node}"
        where = {
            "place": f"{shape}.{rate}" if rate else shape,
            "where": f"{num_nodes} x {ranks_per_node} ranks" + (f" at {rate}" if rate else " on one node"),
            "binds": bool(rate),
        }
        yield turns, {name: [turn.step_s for turn in of_method] for name, of_method in turns.items()}, where
        bench.say(f"steps of {shape} ranks {rate}")


def _in_turns(
    bench: Bench, groups: Sequence[Sequence[Method]], *, num_nodes: int, ranks_per_node: int
) -> Rounds:
    scale = bench.scale
    rates = scale.times.get((num_nodes, ranks_per_node), ())
    if not rates:
        return Rounds()
    settings = {
        "workload": "timed",
        "batch": scale.batch,
        "warmup": scale.warmup_steps,
        "steps": scale.turn_steps,
    }
    shared: dict[str, Any] = {
        "num_ranks": num_nodes * ranks_per_node, "settings": settings, "num_rounds": scale.rounds, "seed": SEED,
        "timeout_s": scale.turn_timeout_s, "idle_s": scale.timeout_s,
    }  # fmt: skip
    if num_nodes == 1:
        with tempfile.TemporaryDirectory() as name:

            def here(method: Method, folder: Path, number: int) -> Command:
                return on_node(method, folder, num_ranks=ranks_per_node)

            turns = TurnTaking(directory=Path(name), command=here, rates={"": lambda: None}, **shared)
            return take_rounds(groups, turns)
    place = _on_cluster(bench, ranks_per_node=ranks_per_node, num_nodes=num_nodes)
    with tempfile.TemporaryDirectory(dir=place.cluster.plan.directory) as name:

        def there(method: Method, folder: Path, number: int) -> Command:
            return on_cluster(method, folder, place=place, number=number)

        set_rates = {rate: partial(place.cluster.set_rate, rate) for rate in rates}
        turns = TurnTaking(directory=Path(name), command=there, rates=set_rates, **shared)
        return take_rounds(groups, turns)


def bubble(bench: Bench) -> list[Record]:
    """Measures figure 5. The ranks sleep instead of computing, so they need no cores of their own."""
    scale = bench.scale
    settings = {
        "micro_batches": scale.bubble_micro_batches, "message_bytes": scale.bubble_message_bytes,
        "steps": scale.bubble_steps, "forward_s": FORWARD_S, "backward_s": BACKWARD_S,
    }  # fmt: skip
    found = _on_node(bench, "bubble", settings, num_ranks=scale.bubble_ranks)
    return figures.bubble_records(found, num_ranks=scale.bubble_ranks)


def checkpoints(bench: Bench) -> list[Record]:
    """Measures figure 6 with the ranks arranged as for figure 1."""
    first, folder = bench.scale.checkpoint_ranks[0], str(bench.folder("checkpoints"))

    def at_all(case: str, num_ranks: int, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for num_nodes, names in arrangements(of_figure("6"), num_ranks=num_ranks).items():
            settings = {"folder": folder, "layouts": names, **more}
            with bench.attempt(f"checkpoints, {case} on {num_nodes} x {num_ranks // num_nodes} ranks"):
                found |= _on_node(bench, case, settings, num_ranks=num_ranks, num_nodes=num_nodes)
        return found

    saved = at_all("save", first)
    loaded = {
        num_ranks: at_all("load", num_ranks, saved=list(saved)) for num_ranks in bench.scale.checkpoint_ranks
    }
    made = figures.checkpoint_records(saved, loaded, num_ranks=first)
    with bench.attempt("torch DCP"):
        dcp = _on_node(bench, "dcp", {"folder": folder, "layouts": list(saved)}, num_ranks=first)
        made.append(figures.dcp_record(dcp))
    return made


def recipe_of(options: Mapping[str, int], parallel: Mapping[str, Any], *, data: Path) -> dict[str, Any]:
    """Returns the recipe of a run; its plan is for the task as it is."""
    document: dict[str, Any] = {
        "run": {"directory": "run", "steps": PLANNED_STEPS, "device": "cpu"},
        "task": {"target": "hpctrain.tasks.characters:Characters", "options": dict(options)},
        "data": {"train": str(data), "global_batch": 16, "prefetch_mb": 1},
        "optimizer": {"name": "adamw"},
        "parallel": dict(parallel),
    }
    if not parallel.keys() & {"shard", "tensor", "pipeline"}:
        document["reduction"] = {"algorithm": "hierarchical"}  # not `auto`, whose trials need memory too
    return document


def _trained(document: Mapping[str, Any], where: Path, *, timeout_s: float) -> list[int]:
    """Trains as the recipe says, in the folder `where`; returns the growth of each rank's memory, in bytes.

    Which rank accesses how much of the memory that ranks share depends on who sums first: its mean counts.
    """
    watched = {"target": "benchmarks.parallel.watched_task:Watched"}
    options = {**document["task"]["options"], "report": str(where / "report")}
    (where / "report").mkdir()
    run = {**document["run"], "directory": str(where / "run")}
    recipe = parse_recipe({**document, "run": run, "task": {**watched, "options": options}})
    (where / "recipe.toml").write_text(to_toml(recipe))
    argv = [*LAUNCH, "-n", str(PLANNED_RANKS), "--", *LAUNCH[:-1], "train", str(where / "recipe.toml")]
    run_checked(argv, what=str(document["parallel"]), environ=user_environment(), timeout_s=timeout_s)
    found = [json.loads(file.read_text()) for file in sorted((where / "report").iterdir())]
    alone, shared = ([entry["most"][kind] - entry["before"][kind] for entry in found] for kind in (0, 1))
    return [own + sum(shared) // len(shared) for own in alone]


SUITE = Suite(
    name="parallel", about=__doc__,
    parts=tuple(
        Part(figures=(figure,), title=title, measure=measure)
        for figure, title, measure in (
            ("1", "equality", equality),
            ("2", "memory", memory),
            ("2", "plan", planned),
            ("3", "traffic", traffic),
            ("4", "2 ranks on one node", times(1, 2)),
            ("4", "4 nodes of one rank", times(4, 1)),
            ("4", "4 nodes of two ranks", times(4, 2)),
            ("5", "bubble", bubble),
            ("6", "checkpoints", checkpoints),
            ("7", "2 ranks on one node", optimizers(1, 2)),
            ("7", "4 nodes of one rank", optimizers(4, 1)),
        )
    ),
    full=FULL, quick=QUICK, tables=figures.tables,
)  # fmt: skip
