"""Starting ranks, without and with a fork server (`hpctrain launch --fork-server`): time, processor time, path
operations, memory, results."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import linear_regression, median, quantiles
from typing import Any

from benchmarks.harness import Bench, NotHere, Part, Suite
from benchmarks.results_file import Record, ratio_record
from benchmarks.start import paths, runs
from benchmarks.start.paths import Operations
from benchmarks.start.ranks import INIT, LEFT
from benchmarks.start.runs import (
    CLIENTS,
    NAMES,
    NOTHING,
    RANKS,
    SERVER,
    UP,
    WITHOUT,
    Compared,
    Memory,
    Workplace,
)

# Of the project's goals. Numbers of ranks that have none may not be slower.
LEAST_TIMES = {NOTHING: {8: 3.0, 48: 8.0}, UP: {2: 2.5, 8: 6.0}}
NO_SLOWER = 1.0
MOST_CPU_S = 0.12
MOST_OPERATIONS = 1.0
MOST_MEMORY = 0.6


def quartiles(values: Sequence[float]) -> list[float]:
    """Returns the lower quartile, the median and the upper quartile; of a single value all three are that one."""
    return [*values] * 3 if len(values) == 1 else quantiles(values, n=4, method="inclusive")


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Returns the ratio of each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def slope(values: Mapping[int, float]) -> float:
    """Returns what a further rank adds: slope of the least-squares line. values: by number of ranks; of one 0."""
    return linear_regression(list(values), list(values.values())).slope if len(values) > 1 else 0.0


def epoch_records(found: Sequence[Compared]) -> list[Record]:
    """Returns the records of figures 1 and 5."""
    records = []
    for kind in (NOTHING, UP):
        for one in found:
            without, forked = one.seconds[WITHOUT], one.seconds[kind]
            records.append(
                ratio_record(
                    f"start.1.{kind}.{one.num_ranks}",
                    f"{_ranks(one.num_ranks)}, {NAMES[kind]}: times as fast as without, command to end",
                    without, forked, bar=LEAST_TIMES[kind].get(one.num_ranks, NO_SLOWER), unit="",
                    samples={"without_s": without, "forked_s": forked},
                )
            )  # fmt: skip
    num_runs = sum(one.num_runs for one in found)
    records.append(
        Record(
            id="start.5",
            what=f"of {num_runs} runs those whose last line, or a record of a step or evaluation of a rank, differs "
            "in any digit from the first run without a fork server",
            value=sum(len(one.differing) for one in found), bar=0, sense="at most", unit="runs",
            samples={
                one.num_ranks: {
                    "runs": one.num_runs, "records": one.num_records, "loss": one.loss, "differing": one.differing
                }
                for one in found
            },
        )
    )  # fmt: skip
    return records


def processor_records(found: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> list[Record]:
    """Returns the record of figure 2. found: see `runs.processor_seconds`."""
    every = {
        end: {kind: further_rank(by_ranks) for kind, by_ranks in kinds.items()}
        for end, kinds in found.items()
    }
    further = every[INIT]
    return [
        Record(
            id="start.2",
            what="processor seconds that a further rank costs until it has started MPI, with a fork server; without: "
            f"{median(further[WITHOUT]):.2f}",
            value=median(further[NOTHING]), bar=MOST_CPU_S, sense="at most", unit="s",
            samples={"further_s": every, "cpu_s": found}, rounds=len(further[NOTHING]),
            range=(min(further[NOTHING]), max(further[NOTHING])),
        )
    ]  # fmt: skip


def node_records(found: Compared, *, num_nodes: int) -> list[Record]:
    """Returns the record of figure 6."""
    without, forked = found.seconds[WITHOUT], found.seconds[NOTHING]
    ranks = f"{num_nodes} nodes x {found.num_ranks // num_nodes} ranks"
    return [
        ratio_record(
            "start.6",
            f"{ranks} by srun, {NAMES[NOTHING]}: times as fast as without, command to end",
            without, forked, bar=NO_SLOWER, unit="",
            samples={
                "without_s": without, "forked_s": forked, "ranks": ranks, "runs": found.num_runs, "loss": found.loss,
                "differing": found.differing,
            },
        )
    ]  # fmt: skip


def further_rank(by_ranks: Mapping[int, Sequence[float]]) -> list[float]:
    """Returns the slope of each round."""
    rounds = min(map(len, by_ranks.values()))
    return [
        slope({num_ranks: values[number] for num_ranks, values in by_ranks.items()})
        for number in range(rounds)
    ]


def path_records(found: Mapping[str, Mapping[int, Operations]]) -> list[Record]:
    """Returns the record of figure 3. found: kind -> number of ranks, with 1 -> operations."""
    most = max(found[NOTHING])
    return [
        Record(
            id="start.3",
            what=f"path operations in the environment during a start of {_ranks(most)} with a fork server, of those of "
            "one rank without",
            value=found[NOTHING][most].count / found[WITHOUT][1].count, bar=MOST_OPERATIONS, sense="at most", unit="",
            samples={kind: {n: asdict(one) for n, one in by_ranks.items()} for kind, by_ranks in found.items()},
        )
    ]  # fmt: skip


def memory_records(found: Mapping[str, Sequence[Memory]], *, num_ranks: int, steps: int) -> list[Record]:
    """Returns the record of figure 4. found: kind -> of each round."""
    without, forked = ([one.total for one in found[kind]] for kind in (WITHOUT, NOTHING))
    return [
        ratio_record(
            "start.4",
            f"memory (PSS) of {_ranks(num_ranks)} after {steps} steps with a fork server, with that of server and "
            "clients, of that without",
            forked, without, bar=MOST_MEMORY, sense="at most", unit="",
            samples={kind: [asdict(one) for one in rounds] for kind, rounds in found.items()},
        )
    ]  # fmt: skip


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"


def digits(value: float, *, count: int = 3) -> str:
    """Returns a number with so many digits that count, without an exponent."""
    places = max(0, count - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{places}f}"


# ---------------------------------------------------------------------- the page


def measured(content: Mapping[str, Any]) -> str:
    """Returns when the last run was, with which seed, and how busy the machine was before and after it."""
    before, after = content["load"]
    busy = ""
    if before > content["machine"]["cores"] / 2:
        busy = " **The machine was busy with other work: times are not those of a quiet one.**"
    return (
        f"{content['date']}; seed {content['seed']}; load of the machine (one minute) before the run {before:g}, after "
        f"it {after:g}.{busy}"
    )


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    samples = {record["id"]: record["samples"] for record in content["records"]}
    made = {"measured": measured(content)} if "load" in content else {}
    if "start.5" in samples:
        made["epochs"] = table_of_epochs(samples)
    for number, name, render in (
        ("2", "processor", table_of_seconds), ("3", "paths", table_of_paths), ("4", "memory", table_of_memory),
        ("6", "nodes", table_of_nodes),
    ):  # fmt: skip
        if f"start.{number}" in samples:
            made[name] = render(samples[f"start.{number}"])
    return made


def table_of_epochs(samples: Mapping[str, Any]) -> str:
    """Returns the table of seconds by number of ranks. samples: of each record."""
    rows = [
        f"| ranks | rounds | {NAMES[WITHOUT]}, s | {NAMES[NOTHING]}, s | times as fast | {NAMES[UP]}, s "
        "| times as fast | runs that differ | loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for num_ranks, results in samples["start.5"].items():
        seconds = {kind: samples[f"start.1.{kind}.{num_ranks}"] for kind in (NOTHING, UP)}
        without = seconds[NOTHING]["without_s"]
        cells = [num_ranks, str(len(without)), _spread(without)]
        for kind in (NOTHING, UP):
            forked = seconds[kind]["forked_s"]
            cells += [_spread(forked), _spread(ratios(without, forked))]
        cells += [f"{len(results['differing'])} of {results['runs']}", results["loss"]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def table_of_seconds(samples: Mapping[str, Any]) -> str:
    """Returns the table of processor seconds by number of ranks."""
    rows = [
        "| ranks | until MPI has started, without, s | with a fork server, s | without / with "
        "| until Python has ended, without, s | with a fork server, s | without / with |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in (*samples["cpu_s"][INIT][WITHOUT], "each further rank"):
        cells = [name]
        for end in (INIT, LEFT):
            without, forked = (
                samples["further_s"][end][kind]
                if name == "each further rank"
                else samples["cpu_s"][end][kind][name]
                for kind in (WITHOUT, NOTHING)
            )
            cells += [_spread(without), _spread(forked), _spread(ratios(without, forked))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def table_of_paths(samples: Mapping[str, Any]) -> str:
    """Returns the table of operations by number of ranks."""
    rows = [
        "| ranks | without | with a fork server | of these, of the process that has most | without / with |",
        "| --- | --- | --- | --- | --- |",
    ]
    for num_ranks, without in samples[WITHOUT].items():
        forked = samples[NOTHING][num_ranks]
        rows.append(
            f"| {num_ranks} | {without['count']:,} | {forked['count']:,} | {forked['by_process'][0]:,} "
            f"| {without['count'] / forked['count']:.2f} |"
        )
    return "\n".join(rows)


def table_of_memory(samples: Mapping[str, Any]) -> str:
    """Returns the table of megabytes by what the processes are."""
    rows = ["| | without, MB | with a fork server, MB |", "| --- | --- | --- |"]

    def megabytes(kind: str, role: str) -> str:
        found = [one["pss"].get(role, 0) / 1e6 for one in samples[kind]]
        number = samples[kind][0]["numbers"].get(role, 0)
        return f"{median(found):.1f} ({number})" if number else ""

    for role in (RANKS, SERVER, CLIENTS):
        rows.append(f"| {role} | {megabytes(WITHOUT, role)} | {megabytes(NOTHING, role)} |")
    every = {kind: [sum(one["pss"].values()) / 1e6 for one in samples[kind]] for kind in (WITHOUT, NOTHING)}
    rows.append(f"| together | {_spread(every[WITHOUT])} | {_spread(every[NOTHING])} |")
    return "\n".join(rows)


def table_of_nodes(samples: Mapping[str, Any]) -> str:
    """Returns the table of seconds on a cluster."""
    without, forked = samples["without_s"], samples["forked_s"]
    cells = [
        samples["ranks"], str(len(without)), _spread(without), _spread(forked), _spread(ratios(without, forked)),
        f"{len(samples['differing'])} of {samples['runs']}", samples["loss"],
    ]  # fmt: skip
    return "\n".join(
        [
            f"| ranks | rounds | {NAMES[WITHOUT]}, s | {NAMES[NOTHING]}, s | times as fast | runs that differ | loss |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            f"| {' | '.join(cells)} |",
        ]
    )


def _spread(values: Sequence[float]) -> str:
    """Returns the median, and the quartiles in brackets."""
    low, middle, high = map(digits, quartiles(values))
    return f"{middle} ({low} to {high})"


# ---------------------------------------------------------------------- the suite

SEED = 37


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of the measurements. epoch_rounds: rounds by number of ranks. cpu_sizes, path_sizes: numbers of ranks."""

    epoch_rounds: dict[int, int]
    cpu_sizes: Sequence[int]
    cpu_rounds: int
    path_sizes: Sequence[int]
    memory_ranks: int
    memory_rounds: int
    memory_steps: int
    node_rounds: int


FULL = Scale(
    epoch_rounds={1: 7, 2: 7, 4: 5, 8: 5, 16: 5, 48: 3},
    cpu_sizes=(2, 4, 8, 16), cpu_rounds=5, path_sizes=(1, 2, 4, 8), memory_ranks=8, memory_rounds=3, memory_steps=50,
    node_rounds=5,
)  # fmt: skip
QUICK = Scale(
    epoch_rounds={2: 1}, cpu_sizes=(1, 2), cpu_rounds=1, path_sizes=(1, 2), memory_ranks=2, memory_rounds=1,
    memory_steps=5, node_rounds=1,
)  # fmt: skip


def _part(figures: tuple[str, ...], title: str, measure: Callable[[Bench, Workplace], list[Record]]) -> Part:
    """Returns a part that also notes when it was measured, and how busy the machine was before and after it."""

    def run(bench: Bench) -> list[Record]:
        load = bench.about.setdefault("load", [_load()])
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        bench.about.setdefault("date", now)
        bench.about["seed"] = SEED
        made = measure(
            bench,
            bench.once("start", lambda: Workplace(bench.folder("start", within=Path(tempfile.gettempdir())))),
        )
        load[1:] = [_load()]
        return made

    return Part(figures=figures, title=title, measure=run)


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _epochs(bench: Bench, place: Workplace) -> list[Record]:
    found = []
    for num_ranks, rounds in bench.scale.epoch_rounds.items():
        found.append(runs.epochs(place, num_ranks=num_ranks, rounds=rounds, seed=SEED))
        bench.say(f"epochs with {num_ranks} ranks measured")
    return epoch_records(found)


def _processor_seconds(bench: Bench, place: Workplace) -> list[Record]:
    bench.starts += runs.starts(place)
    scale = bench.scale
    found = runs.processor_seconds(place, sizes=scale.cpu_sizes, rounds=scale.cpu_rounds, seed=SEED)
    return processor_records(found)


def _paths(bench: Bench, place: Workplace) -> list[Record]:
    if (reason := paths.why_not()) is not None:
        raise NotHere(reason)

    def counts(kind: str) -> dict[int, Operations]:
        return {n: paths.measure(place, num_ranks=n, forked=kind == NOTHING) for n in bench.scale.path_sizes}

    return path_records({kind: counts(kind) for kind in (WITHOUT, NOTHING)})


def _memory(bench: Bench, place: Workplace) -> list[Record]:
    num_ranks, steps = bench.scale.memory_ranks, bench.scale.memory_steps
    found: dict[str, list[Memory]] = {WITHOUT: [], NOTHING: []}
    for _ in range(bench.scale.memory_rounds):
        for kind, rounds in found.items():
            rounds.append(runs.memory(place, kind=kind, num_ranks=num_ranks, steps=steps))
    return memory_records(found, num_ranks=num_ranks, steps=steps)


NODES, RANKS_PER_NODE = 4, 2


def _nodes(bench: Bench, place: Workplace) -> list[Record]:
    cluster = bench.cluster(shared=[place.directory])
    found = runs.epochs_on_nodes(
        place, cluster, ranks_per_node=RANKS_PER_NODE, rounds=bench.scale.node_rounds, seed=SEED
    )
    return node_records(found, num_nodes=NODES)


SUITE = Suite(
    name="start", about=__doc__,
    parts=(
        _part(("1", "5"), "epochs", _epochs),
        _part(("2",), "2 ranks", _processor_seconds),
        _part(("3",), "path operations", _paths),
        _part(("4",), "memory", _memory),
        _part(("6",), f"{NODES} nodes", _nodes),
    ),
    full=FULL, quick=QUICK, tables=tables,
)  # fmt: skip
