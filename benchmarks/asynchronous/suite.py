"""Fewer synchronisations: steps and bytes at 50 Mbit/s between two nodes, and the held-out loss at equal samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.asynchronous.stale_steps import at_most
from benchmarks.asynchronous.training import Course, pack, train
from benchmarks.harness import Bench, Part, Suite
from benchmarks.results_file import Record
from benchmarks.results_page import markdown

MODULE = "benchmarks.asynchronous.ranks"
SEED = 40
RATE = "50mbit"
EVERY = 50
SYNCHRONOUS, PEER = "synchronous", "post-local over gloo"
# Name -> the table of `reduction.schedule`.
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "local-sgd": {"method": "local-sgd", "every": EVERY},
    "local-sgd fp16": {"method": "local-sgd", "every": EVERY, "wire": "fp16"},
    "diloco int8": {"method": "diloco", "every": EVERY, "wire": "int8"},
    "daso int8": {"method": "daso", "every": EVERY, "wait": 40, "wire": "int8"},
}
METHODS: Mapping[str, Any] = {SYNCHRONOUS: SYNCHRONOUS, PEER: PEER, **SCHEDULES}
MOST_STEP_S = 0.35
MOST_BYTES = 0.01
MOST_LOSS = 1.02
LEAST_WON_BACK = 0.8
STALE_RANKS = 8
OVER_SYNCHRONOUS, OVER_PEER = 5.0, 2.0
COURSES = {
    "characters": Course(
        recipe="examples/characters.toml",
        packing=("python-source", "--window", "64", "data/characters"),
        changes={"task.options.window": 64, "task.options.width": 64, "run.steps": 600, "optimizer.lr": 2e-3},
        metric="nats_per_character",
    ),
    "digits": Course(
        recipe="examples/digits.toml", packing=("digits", "data/digits"), changes={"run.epochs": 40}, metric="loss",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements.

    width, layers: of the model. samples: of a rank in a step. num_rounds: timed rounds of a method. seeds: of the
    trainings, each once with each schedule. changes: overrides of all recipes. stale_steps, stale_rounds: of each cell
    with stale reads.
    """

    width: int = 2236
    layers: int = 5  # 25 million parameters
    samples: int = 4
    num_rounds: int = 2
    least_steps: int = 1
    seeds: tuple[int, ...] = (1,)
    changes: tuple[tuple[str, Any], ...] = ()
    courses: tuple[str, ...] = tuple(COURSES)
    stale_steps: int = 70
    stale_rounds: int = 1
    timeout_s: float = 600.0


FULL = Scale()
QUICK = replace(
    FULL, width=64, layers=2, num_rounds=1, seeds=(1,), changes=(("run.steps", 4), ("data.evaluation_samples", 64)),
    courses=("characters",), stale_steps=10, stale_rounds=1, timeout_s=200.0,
)  # fmt: skip

Found = Mapping[str, Mapping[str, Any]]  # of a method: what `ranks.steps` returns


# ---------------------------------------------------------------------- the records


def step_s(found: Found, name: str) -> list[float]:
    """Returns the seconds of a step in each round of a method."""
    return [seconds / found[name]["steps"] for seconds in found[name]["seconds"]]


def bytes_per_step(found: Found, name: str) -> float:
    """Returns the bytes of a step that left the node that sent most; the median of the rounds."""
    return float(median(max(counted) / found[name]["steps"] for counted in found[name]["node_bytes"]))


def step_records(found: Found) -> list[Record]:
    """Returns the records of figures 1 (seconds), 2 (bytes) and 3 (samples per second)."""
    records = []
    for name in ("local-sgd", "local-sgd fp16"):
        if name in found:
            records.append(
                Record(
                    id=f"async.1.{name.replace(' ', '-')}", value=median(step_s(found, name)), bar=MOST_STEP_S,
                    what=f"{name}, every {EVERY}: seconds of a step, where a synchronous step takes "
                    f"{median(step_s(found, SYNCHRONOUS)):.2f} s",
                    sense="at most", unit="s", samples={name: found[name], SYNCHRONOUS: found[SYNCHRONOUS]},
                )
            )  # fmt: skip
    if "local-sgd" in found:
        ratio = bytes_per_step(found, SYNCHRONOUS) / bytes_per_step(found, "local-sgd") / EVERY
        records.append(
            Record(
                id="async.2.local-sgd", value=abs(ratio - 1), bar=MOST_BYTES, sense="at most", unit="bytes/bytes",
                what=f"local-sgd: bytes of a synchronous step / {EVERY} x bytes of a local step, how far from 1",
                samples={name: bytes_per_step(found, name) for name in found},
            )
        )  # fmt: skip
    for name in ("diloco int8", "daso int8"):
        for other, bar in ((SYNCHRONOUS, OVER_SYNCHRONOUS), (PEER, OVER_PEER)):
            if name in found and other in found:
                mine, theirs = step_s(found, name), step_s(found, other)
                records.append(
                    Record(
                        id=f"async.3.{name.replace(' ', '-')}.{'peer' if other == PEER else other}",
                        what=f"{name}, every {EVERY}: samples/s over those of {other} ({median(theirs):.3f} s / "
                        f"{median(mine):.3f} s a step)",
                        value=median(theirs) / median(mine), bar=bar, sense="at least", unit="samples/samples",
                        samples={name: mine, other: theirs},
                    )
                )  # fmt: skip
    return records


def loss_records(course: str, found: Mapping[str, Sequence[float]]) -> list[Record]:
    """Returns the records of figure 4. found: of a method the held-out losses, by seed."""
    of_synchronous = found[SYNCHRONOUS]
    records = []
    for name, losses in found.items():
        if name != SYNCHRONOUS:
            ratios = [mine / other for mine, other in zip(losses, of_synchronous, strict=True)]
            records.append(
                Record(
                    id=f"async.4.{course}.{name.replace(' ', '-')}",
                    what=f"{course}, {name}, every {EVERY}: held-out loss over that of synchronous training at equal "
                    f"samples ({median(losses):.4f} / {median(of_synchronous):.4f})",
                    value=median(ratios), bar=MOST_LOSS, sense="at most", unit="loss/loss",
                    samples={name: list(losses), SYNCHRONOUS: list(of_synchronous)},
                )
            )  # fmt: skip
    return records


def stale_record(found: Mapping[str, Any]) -> Record:
    """Returns the record of figure 5. found: what `stale_steps` returns."""
    seconds = {name: median(one["seconds"] for one in of) for name, of in found["cells"].items()}
    slow = seconds["synchronous, one rank slow"]
    lost_s, won_s = slow - seconds["synchronous"], slow - seconds["stale, one rank slow"]
    return Record(
        id="async.5.stale-reads", value=won_s / lost_s, bar=LEAST_WON_BACK, sense="at least", unit="s/s",
        what=f"staleness {found['staleness']} on {found['ranks']} ranks, one of which is twice as slow in 10% of its "
        f"steps: share of the lost time that is won back ({seconds['synchronous']:.3f} s a step without and "
        f"{slow:.3f} s with the slow rank, {seconds['stale, one rank slow']:.3f} s with stale reads; taking over work "
        f"can win back {at_most(found['ranks']):.2f})",
        samples=dict(found),
    )  # fmt: skip


# ---------------------------------------------------------------------- the page


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of all methods: seconds and bytes of a step."""
    samples = {record["id"]: record["samples"] for record in content["records"]}
    if "async.1.all" not in samples:
        return {}
    every = samples["async.1.all"]
    return {
        "methods": markdown(
            ["method", "s a step", "MB that leave a node, a step", "times the samples/s of synchronous"],
            [
                [
                    name,
                    f"{of['step_s']:.3f}",
                    f"{of['bytes'] / 1e6:.2f}",
                    f"{every[SYNCHRONOUS]['step_s'] / of['step_s']:.1f}",
                ]
                for name, of in every.items()
            ],
        )
    }


def all_record(found: Found) -> Record:
    """Returns the record with the seconds and bytes of every method; it holds if all were measured."""
    every = {
        name: {
            "step_s": median(step_s(found, name)),
            "bytes": bytes_per_step(found, name),
            "rounds": of["seconds"],
        }
        for name, of in found.items()
    }
    return Record(
        id="async.1.all", what=f"methods that were measured at {RATE}", value=float(len(every)),
        bar=float(len(METHODS)), sense="at least", unit="methods", samples=every,
    )  # fmt: skip


# ---------------------------------------------------------------------- the suite


def _steps(bench: Bench) -> Iterator[Record]:
    scale: Scale = bench.scale
    place = bench.on_cluster(MODULE, rate=RATE, ranks_per_node=1, num_nodes=2)
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        settings = {
            "method": method, "every": EVERY, "seed": SEED, "width": scale.width, "layers": scale.layers,
            "samples": scale.samples, "num_rounds": scale.num_rounds, "least_steps": scale.least_steps,
        }  # fmt: skip
        with bench.attempt(name):
            found[name] = place.run("steps", settings, timeout_s=scale.timeout_s)
    if SYNCHRONOUS in found:
        yield all_record(found)
        yield from step_records(found)


def _losses(name: str) -> Callable[[Bench], Iterator[Record]]:
    def measure(bench: Bench) -> Iterator[Record]:
        scale: Scale = bench.scale
        if name not in scale.courses:
            return
        directory = bench.folder(name)
        course = replace(COURSES[name], changes={**COURSES[name].changes, **dict(scale.changes)})
        pack(course, directory=directory, timeout_s=scale.timeout_s)
        found: dict[str, list[float]] = {}
        for method in (SYNCHRONOUS, *SCHEDULES):
            with bench.attempt(f"{name}, {method}"):
                found[method] = [
                    train(
                        course, SCHEDULES.get(method), name=f"{method.replace(' ', '-')}-{seed}", seed=seed,
                        directory=directory, timeout_s=scale.timeout_s,
                    )
                    for seed in scale.seeds
                ]  # fmt: skip
        if SYNCHRONOUS in found:
            yield from loss_records(name, found)

    return measure


def _stale_reads(bench: Bench) -> Iterator[Record]:
    scale: Scale = bench.scale
    settings = {
        "staleness": 3,
        "num_steps": scale.stale_steps,
        "step_s": 1.0,
        "num_rounds": scale.stale_rounds,
    }
    place = bench.one_node("benchmarks.asynchronous.stale_steps", num_ranks=STALE_RANKS)
    yield stale_record(place.run("stale_steps", settings, timeout_s=scale.timeout_s))


SUITE = Suite(
    name="async",
    about=__doc__,
    full=FULL,
    quick=QUICK,
    tables=tables,
    parts=(
        Part(figures=("1", "2", "3"), title=f"25 million parameters, two nodes, {RATE}", measure=_steps),
        *(Part(figures=("4",), title=f"held-out loss of {name}", measure=_losses(name)) for name in COURSES),
        Part(
            figures=("5",),
            title=f"stale reads on {STALE_RANKS} ranks, one of them slow at times",
            measure=_stale_reads,
        ),
    ),
)
