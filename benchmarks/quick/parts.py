"""The parts of the quick run: what each measures of the other suites, with how many rounds, and for how long."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.checkpoint import suite as checkpoint
from benchmarks.data import suite as data
from benchmarks.harness import Bench
from benchmarks.headlines import HEADLINES
from benchmarks.places import run_checked, salloc
from benchmarks.reduction import suite as reduction
from benchmarks.results_file import Record, figure_of
from benchmarks.step.runs import OneNode, Scale as StepScale, measure as measure_step, pack, working_directory
from benchmarks.step.suite import records_of
from benchmarks.step.variants import ALONE, CELLS, FLAT, PEER, YIELDING_PEER, companions, default_of

SEED = 20
NODES = (1, 2, 4)
RATE = "1gbit"
RECIPE = "characters"
SCALING_BAR = 0.9  # of what the cores allow; set by no issue
REDUCTION = replace(reduction.FULL, time_rounds=3, others=(), timeout_s=180.0)
STEP = StepScale(rounds=4, screening_share=0.2, screening_s=1.0, turn_s=2.0, start_s=40.0, restart_every=0)
CHECKPOINT = replace(checkpoint.FULL, rounds=3, small_rounds=7)
DATA = replace(data.FULL, warm_rounds=3, cold_rounds=0, kinds=("images",), compressed=("gzip-in-order",))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the run. budget_s: time after which it is ended. measure: yields records as soon as it has them.
    on_cluster: whether it needs the four nodes."""

    name: str
    title: str
    budget_s: float
    measure: Callable[[Bench], Iterable[Record]]
    on_cluster: bool = False

    @property
    def ids(self) -> list[str]:
        """Ids of the headline figures that it measures."""
        return [headline.id for headline in HEADLINES if headline.suite == self.name]


def _reduction(bench: Bench) -> Iterator[Record]:
    bench.scale = REDUCTION
    for part in reduction.SUITE.parts:
        if {*part.figures} <= {"1", "2"}:
            yield from part.measure(bench)
            bench.keep_starts(f"reduction.{part.figures[0]}", part.title)
            bench.say(part.title)


def _scaling(bench: Bench) -> list[Record]:
    """Measures strong scaling by `hpctrain bench scaling`, in one allocation of four nodes, which share the cores."""
    directory, cluster = bench.enter(working_directory()), bench.cluster()
    pack(RECIPE, directory=directory)
    cluster.set_rate(RATE)
    document = directory / "scaling.json"
    words = [
        "hpctrain", "bench", "scaling", f"examples/{RECIPE}.toml", "--nodes", ",".join(map(str, NODES)),
        "--ranks-per-node", "1", "--steps", "12", "--warmup-steps", "3", "--json", str(document),
    ]  # fmt: skip
    argv = cluster.argv([*salloc(max(NODES)), *words], cwd=directory)
    run_checked(argv, what="scaling", environ=cluster.environment(), timeout_s=300.0)
    bench.say(f"{NODES[0]} to {NODES[-1]} nodes")
    return scaling_records(json.loads(document.read_text()), cores=os.cpu_count() or 1)


def _step(bench: Bench) -> list[Record]:
    """Measures the default, Horovod's own loop, and ranks that never communicate, without the search for the best
    backend and algorithm."""
    cell = CELLS["characters-2"]
    names = (FLAT, PEER, YIELDING_PEER, ALONE)
    variants = [default_of(cell), *(variant for variant in companions(cell) if variant.name in names)]
    (found,) = measure_step(
        cell, place=OneNode(), directory=bench.enter(working_directory()), scale=STEP, seed=SEED,
        say=bench.say, variants=variants,
    )  # fmt: skip
    return records_of(cell, found)


def _checkpoint(bench: Bench) -> Iterator[Record]:
    bench.scale = CHECKPOINT
    yield from checkpoint.main_saves(bench, peers=checkpoint.FEW_PEERS, engines=("auto",))
    yield checkpoint.loads_with_peers(bench, peers=("dcp",))
    yield checkpoint.stalls(bench)


def _data(bench: Bench) -> list[Record]:
    bench.scale = DATA
    return data.speeds(bench)


# Those on the cluster come first: its daemons take a little of the processors while it is up.
PARTS = (
    Part(name="reduction", title="gradient sums on four nodes, in turn with DDP on Gloo, Horovod and MPI",
         budget_s=215, measure=_reduction, on_cluster=True),
    Part(name="scaling", title="training on one, two and four nodes", budget_s=120, measure=_scaling, on_cluster=True),
    Part(name="step", title="training steps on two ranks, in turn with Horovod's own loop", budget_s=100,
         measure=_step),
    Part(name="checkpoint", title="saving and loading, in turn with torch DCP and the disk", budget_s=60,
         measure=_checkpoint),
    Part(name="data", title="reading, in turn with h5py, MosaicML streaming, WebDataset and raw reading", budget_s=105,
         measure=_data),
)  # fmt: skip


def kept(
    part: Part, records: Sequence[Record], *, error: str | None
) -> tuple[list[Record], dict[str, list[str]]]:
    """Returns the records of the part's headline figures, and of those that are missing figure -> reasons.

    error: what ended the part before its end. A record without samples is one that a suite makes where a variant that
    it needs has failed.
    """
    by_id: Mapping[str, Record] = {record.id: record for record in records if record.samples}
    missing: dict[str, list[str]] = {}
    for name in part.ids:
        if name not in by_id:
            reason = next((record.what for record in records if record.id == name), error)
            reasons = missing.setdefault(figure_of(name), [])
            reasons += [reason or f"{name}: no such figure"] if reason not in reasons else []
    return [by_id[name] for name in part.ids if name in by_id], missing


def scaling_records(document: Mapping[str, Any], *, cores: int) -> list[Record]:
    """Returns for each number of nodes but the first the speed-up / the one that the machine allows, on which the nodes
    share `cores` cores. document: `hpctrain.bench.scaling/1`."""
    records = []
    for size in document["sizes"][1:]:
        nodes, speedup = size["nodes"], size["speedup"]
        allowed = min(size["ranks"], cores) / document["baseline_ranks"]
        records.append(
            Record(
                id=f"scaling.nodes-{nodes}",
                what=f"{RECIPE}, {nodes} nodes of one rank, {RATE}: speed-up {speedup['value']:.2f} (95% interval "
                f"{speedup['low']:.2f} to {speedup['high']:.2f}) / {allowed:g}, what {cores} cores allow",
                value=speedup["value"] / allowed, bar=SCALING_BAR, sense="at least", unit="samples/samples",
                samples={
                    "samples/s": {
                        str(run["ranks"]): [
                            other["samples_per_s"]
                            for other in document["runs"]
                            if other["ranks"] == run["ranks"]
                        ]
                        for run in document["runs"]
                    },
                    "speedup": speedup,
                },
                rounds=size["repeats"], range=(speedup["least"] / allowed, speedup["greatest"] / allowed),
            )
        )  # fmt: skip
    return records
