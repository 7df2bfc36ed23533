"""Converts measurements to records and defines their bars; the tables of the page. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.parallel.layouts import BITS, LAYOUTS, Counts, Layout
from benchmarks.parallel.timed import METHODS, OPTIMIZERS, Method
from benchmarks.results_file import Record, ratio_record
from benchmarks.results_page import markdown

MOST_DIFFERENCE = 1e-10
MOST_OFF_MEMORY = 0.05
MOST_OFF_PLAN = 0.10
MOST_OF_TRAFFIC = 1.03
MOST_OFF_LOSS = 1e-12
LEAST_FASTER = {True: 1.2, False: 1.0}  # by whether links bind
LEAST_AS_FAST = 1.0  # tensor groups and pipelines
LEAST_FASTER_THAN_HOROVOD = {True: 1.5, False: 1.0}  # by whether links bind
MOST_EXPOSED = 1.0  # of ZeRO-2, times whole copies
MOST_ABOVE_BUBBLE = 0.03
OF_ONE_STAGE = ("gpipe", "1f1b")


def equality_records(
    found: Mapping[int, Sequence[Mapping[str, Mapping[str, Mapping[str, float]]]]], *, steps: int
) -> list[Record]:
    """Returns the records of figure 1. found: by number of ranks, the results of `cases.equality` in each launch."""
    relative, bits = (_by_pair(found, kind) for kind in ("relative", "bits"))
    differences = [
        Record(
            id=f"parallel.1.{workload}.{layout}",
            what=f"{workload}, {LAYOUTS[layout].what}, {_listed(off)}: relative difference of the parameters from one "
            f"process after {steps} steps, the largest",
            value=max(off.values()), bar=MOST_DIFFERENCE, sense="at most", unit="", samples=off,
        )
        for (workload, layout), off in relative.items()
    ]  # fmt: skip
    different = [
        Record(
            id=f"parallel.1.bits.{workload}.{layout}",
            what=f"{workload}, {LAYOUTS[layout].what}, {_listed(counts)}, float32: parameters whose bits differ from "
            f"those of whole copies on the same ranks after {steps} steps",
            value=max(counts.values()), bar=0, sense="at most", unit="tensors", samples=counts,
        )
        for (workload, layout), counts in bits.items()
    ]  # fmt: skip
    return [*differences, *different]


def _by_pair(
    found: Mapping[int, Sequence[Mapping[str, Mapping[str, Mapping[str, float]]]]], kind: str
) -> dict[tuple[str, str], dict[int, float]]:
    """Returns (workload, layout) -> number of ranks -> value, in the order of the layouts."""
    pairs: dict[tuple[str, str], dict[int, float]] = {}
    for num_ranks, launches in found.items():
        for launch in launches:
            for workload, layouts in launch[kind].items():
                for layout, value in layouts.items():
                    pairs.setdefault((workload, layout), {})[num_ranks] = value
    workloads, order = [workload for workload, _ in pairs], list(LAYOUTS)
    return dict(
        sorted(pairs.items(), key=lambda item: (workloads.index(item[0][0]), order.index(item[0][1])))
    )


def memory_record(layout: Layout, found: Mapping[str, Any], *, num_ranks: int, sharing: int) -> Record:
    """Returns a record of figure 2. found: result of `cases.memory`. sharing: number of ranks that share a copy."""
    counts = Counts(parameters=found["parameters"], split=found["split"])
    formula = layout.held_bytes(counts, sharing=sharing)
    off = [held / formula - 1 for held in found["held_bytes"]]
    return Record(
        id=f"parallel.2.{layout.name}.{num_ranks}",
        what=f"{layout.what}, {_ranks(num_ranks)}, {counts.parameters / 1e6:.1f} million parameters: growth of a "
        f"rank's memory off {formula / 1e6:.0f} MB, {formula / counts.parameters:.3g} bytes per parameter",
        value=max(map(abs, off)), bar=MOST_OFF_MEMORY, sense="at most", unit="", samples=dict(found) | {"off": off},
    )  # fmt: skip


def plan_record(
    way: str, *, measured: Mapping[str, Sequence[int]], planned: Mapping[str, int], num_ranks: int
) -> Record:
    """Returns a record of figure 2 that compares `hpctrain plan` with a run.

    measured: by model, the growth of each rank's memory in bytes. planned: by model, that of the rank that needs most.
    """
    grown, expected = _growth(measured, planned)
    return Record(
        id=f"parallel.2.plan.{way}",
        what=f"{way}, {num_ranks} ranks: the most memory of a rank in a run off what `hpctrain plan` says, "
        f"{expected / 1e6:.0f} MB",
        value=abs(expected / grown - 1), bar=MOST_OFF_PLAN, sense="at most", unit="",
        samples={"measured": dict(measured), "planned": dict(planned)},
    )  # fmt: skip


def _growth(measured: Mapping[str, Sequence[int]], planned: Mapping[str, int]) -> tuple[int, int]:
    """Returns the growth from the small to the large model, measured and planned."""
    return max(measured["large"]) - max(measured["small"]), planned["large"] - planned["small"]


def traffic_record(
    layout: Layout, wire: str, found: Mapping[str, Any], *, num_nodes: int, ranks_per_node: int, steps: int
) -> Record:
    """Returns a record of figure 3. found: result of `cases.traffic`."""
    counted = found[f"{layout.name}/{wire}"]
    counts = Counts(**counted["counts"])
    formula = layout.sent_bytes(counts, num_nodes=num_nodes, bits=BITS[wire])
    return Record(
        id=f"parallel.3.{layout.name}.{wire}",
        what=f"{layout.what}, {wire}, {num_nodes} nodes x {_ranks(ranks_per_node)}: bytes that leave a node in a "
        f"step / {formula / counts.parameters / 4:.3g} of the parameters' bytes, {formula / 1e6:.1f} MB",
        value=max(counted["node_bytes"]) / steps / formula, bar=MOST_OF_TRAFFIC, sense="at most", unit="bytes/bytes",
        samples={**counted, "steps": steps, "formula_bytes": formula, "pause": found["pause"]},
    )  # fmt: skip


def time_records(
    seconds: Mapping[str, Sequence[float]], methods: Mapping[str, Method], *, place: str, where: str, binds: bool,
) -> list[Record]:  # fmt: skip
    """Returns the records at one place and link rate.

    seconds: of a step, by method, of each round. binds: whether the links limit the speed there. The best of a group is
    the one with the smallest median, of hpctrain's layouts and of the peers whose ranks do not divide samples.
    """
    ours = [name for name in seconds if methods[name].layout is not None]
    peers = [name for name in seconds if methods[name].layout is None]
    rows: list[tuple[str, list[str], list[str], float]] = []
    for label, wire in (("best", "fp32"), ("best-16", "fp16")):
        mine, others = (
            [n for n in names if methods[n].wire == wire and not methods[n].divides_samples]
            for names in (ours, peers)
        )
        rows.append((label, mine, others, LEAST_FASTER[binds]))
    for name in ours:
        method = methods[name]
        if method.wire == "fp32" and method.layout is not None and LAYOUTS[method.layout].peer:
            bar = LEAST_AS_FAST if method.divides_samples else LEAST_FASTER[binds]
            rows.append((method.layout, [name], [LAYOUTS[method.layout].peer], bar))
    made = []
    for label, mine, others, bar in rows:
        here = [name for name in others if name in seconds]
        if not mine or not here:
            continue
        us, peer = _fastest(mine, seconds), _fastest(here, seconds)
        made.append(
            ratio_record(
                f"parallel.4.{place}.{label}",
                f"{where}: {methods[peer].what} on Gloo / ours, {methods[us].what}: {_medians(seconds, peer, us)}",
                seconds[peer], seconds[us], bar=bar, unit="times as fast",
                samples=dict(seconds) if label == "best" else {us: seconds[us], peer: seconds[peer]},
            )
        )  # fmt: skip
    return made


def horovod_records(
    seconds: Mapping[str, Sequence[float]], methods: Mapping[str, Method], *, place: str, where: str, binds: bool,
) -> list[Record]:  # fmt: skip
    """Returns the record of each wire at one place and link rate; the arguments are those of `time_records`.

    The best of Horovod's starts, the one with the smallest median, counts.
    """
    made = []
    for wire in dict.fromkeys(methods[name].wire for name in seconds):
        of_wire = {name: times for name, times in seconds.items() if methods[name].wire == wire}
        ours = [name for name in of_wire if methods[name].is_ours]
        peers = [name for name in of_wire if not methods[name].is_ours]
        if not ours or not peers:
            continue
        us, peer = _fastest(ours, seconds), _fastest(peers, seconds)
        made.append(
            ratio_record(
                f"parallel.7.{place}.{wire}",
                f"{where}: a step of DistributedOptimizer, {methods[peer].what} / {methods[us].what}: "
                f"{_medians(seconds, peer, us)}",
                seconds[peer], seconds[us], bar=LEAST_FASTER_THAN_HOROVOD[binds], unit="times as fast", samples=of_wire,
            )
        )  # fmt: skip
    return made


def _fastest(names: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> str:
    return min(names, key=lambda name: median(seconds[name]))


def _medians(seconds: Mapping[str, Sequence[float]], *names: str) -> str:
    return f"{' / '.join(f'{1e3 * median(seconds[name]):.0f}' for name in names)} ms"


def exposed_records(exposed: Mapping[str, Sequence[float]], *, place: str, where: str) -> list[Record]:
    """Returns the records of exposed communication in figure 4.

    exposed: by method, for each round the seconds per step that its slowest rank only waited for communication.
    """
    if not {"ours-gradients", "ours-none"} <= exposed.keys():
        return []
    return [
        ratio_record(
            f"parallel.4.{place}.exposed",
            f"{where}: exposed communication of a step, {LAYOUTS['gradients'].what} / {LAYOUTS['none'].what}: "
            f"{_medians(exposed, 'ours-gradients', 'ours-none')}",
            exposed["ours-gradients"], exposed["ours-none"], bar=MOST_EXPOSED, sense="at most", unit="s/s",
            samples=dict(exposed),
        )
    ]  # fmt: skip


def bubble_records(found: Sequence[Mapping[str, Any]], *, num_ranks: int) -> list[Record]:
    """Returns the records of figure 5. found: results of `bubble.bubble`."""

    def share(one: Mapping[str, Any], seconds: float) -> float:
        return 1 - float(one["alone_s"]) / seconds

    measured = {
        (one["message_bytes"], one["micro_batches"], one["schedule"]): share(one, median(one["seconds"]))
        for one in found
    }  # fmt: skip
    made = []
    for one in found:
        message_bytes, micro_batches, schedule = one["message_bytes"], one["micro_batches"], one["schedule"]
        formula = (num_ranks - 1) / (micro_batches + num_ranks - 1)
        if schedule in OF_ONE_STAGE:
            bar, against = formula + MOST_ABOVE_BUBBLE, f"the bar is (p-1)/(m+p-1) + {MOST_ABOVE_BUBBLE}"
        else:
            bar, against = measured[message_bytes, micro_batches, "1f1b"], "the bar is that of 1f1b"
        made.append(
            Record(
                id=f"parallel.5.{schedule}.{micro_batches}.{message_bytes // 1024}KiB",
                what=f"{schedule}, {_ranks(num_ranks)}, {micro_batches} micro-batches, messages of "
                f"{message_bytes // 1024} KiB: part of a step in which a rank waits; {against}",
                value=measured[message_bytes, micro_batches, schedule], bar=round(bar, 4), sense="at most",
                unit="s/s", samples=dict(one), rounds=len(one["seconds"]),
                range=sorted(share(one, edge) for edge in (min(one["seconds"]), max(one["seconds"]))),
            )
        )  # fmt: skip
    return made


def checkpoint_records(
    saved: Mapping[str, Sequence[float]], loaded: Mapping[int, Mapping[str, Mapping[str, Any]]], *, num_ranks: int,
) -> list[Record]:  # fmt: skip
    """Returns the records of figure 6.

    saved: by layout, the next losses of the run that saved. loaded: by number of ranks, the result of
    `checkpoints.load`. num_ranks: number of ranks that have saved.
    """
    made = []
    for ranks, pairs in loaded.items():
        if not pairs:
            continue
        off = {
            pair: max(
                abs(loss / expected - 1)
                for loss, expected in zip(found["losses"], saved[pair.partition("/")[0]], strict=True)
            )
            for pair, found in pairs.items()
        }
        different = {pair: found["different"] for pair, found in pairs.items()}
        what = f"{len(pairs)} pairs of layouts, saved on {_ranks(num_ranks)}, loaded on {_ranks(ranks)}"
        made += [
            Record(id=f"parallel.6.bits.{ranks}", what=f"{what}: tensors whose bits differ, the most of a pair",
                   value=max(different.values()), bar=0, sense="at most", unit="tensors", samples=different),
            Record(id=f"parallel.6.loss.{ranks}", what=f"{what}: relative difference of the next losses, the largest",
                   value=max(off.values()), bar=MOST_OFF_LOSS, sense="at most", unit="", samples=off),
        ]  # fmt: skip
    return made


def dcp_record(found: Mapping[str, int]) -> Record:
    """Returns the record of figure 6 about torch DCP. found: result of `checkpoints.dcp`."""
    exported = sum(name.startswith("to/") for name in found)
    return Record(
        id="parallel.6.dcp",
        what=f"torch DCP, {exported} exports and {len(found) - exported} import: tensors whose bits differ, the most "
        "of one",
        value=max(found.values()), bar=0, sense="at most", unit="tensors", samples=dict(found),
    )  # fmt: skip


def _listed(by_ranks: Mapping[int, Any]) -> str:
    return f"ranks {', '.join(map(str, by_ranks))}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


# ---------------------------------------------------------------------- the page


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    records, found = content["records"], {}
    of_plan = [record for record in records if record["id"].startswith("parallel.2.plan.")]
    if memory := [r for r in records if r["id"].startswith("parallel.2.") and r not in of_plan]:
        found["memory"] = _table_of_memory(memory)
    if of_plan:
        found["plan"] = _table_of_plan(of_plan)
    if times := [r for r in records if r["id"].startswith("parallel.4.") and r["id"].endswith(".best")]:
        found["times"] = _table_of_times(
            {_place(r): r["samples"] for r in times}, METHODS, peers=", on Gloo", ours=", ours"
        )
    if of_horovod := [r for r in records if r["id"].startswith("parallel.7.")]:
        places: dict[str, dict[str, Sequence[float]]] = {}
        for record in of_horovod:
            places.setdefault(_place(record), {}).update(record["samples"])
        found["optimizers"] = _table_of_times(places, OPTIMIZERS)
    return found


def _place(record: Mapping[str, Any]) -> str:
    """Returns `4x1.1gbit` for `parallel.4.4x1.1gbit.best`."""
    return ".".join(record["id"].split(".")[2:-1])


def _table_of_memory(records: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for record in records:
        samples = record["samples"]
        formula = samples["held_bytes"][0] / (1 + samples["off"][0])
        held, peak = (
            " to ".join(f"{size / 1e6:.0f}" for size in sorted({min(sizes), max(sizes)}))
            for sizes in (samples["held_bytes"], samples["peak_bytes"])
        )
        rows.append([record["id"].removeprefix("parallel.2."), f"{formula / 1e6:.0f}", held, peak])
    return markdown(("layout and ranks", "formula, MB", "held by a rank, MB", "peak in a step, MB"), rows)


def _table_of_plan(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the growth from the small to the large model: planned, and of the rank that grew most."""
    rows = []
    for record in records:
        grown, expected = _growth(**record["samples"])
        way = record["id"].removeprefix("parallel.2.plan.")
        rows.append([way, f"{expected / 1e6:.0f}", f"{grown / 1e6:.0f}", f"{expected / grown - 1:+.0%}"])
    return markdown(("way", "planned, MB", "measured, MB", "off"), rows)


def _table_of_times(
    places: Mapping[str, Mapping[str, Sequence[float]]], methods: Mapping[str, Method], *, peers: str = "",
    ours: str = "",
) -> str:  # fmt: skip
    """Returns milliseconds of a step by method, and a column for each place.

    places: place -> method -> seconds of each round. peers, ours: what is added to their names.
    """
    rows = [f"| ms, median of the rounds | {' | '.join(places)} |", f"| --- |{' --- |' * len(places)}"]
    for name, method in methods.items():
        cells = [
            f"{1e3 * median(seconds[name]):.0f}" if name in seconds else "" for seconds in places.values()
        ]
        if any(cells):
            rows.append(f"| {method.what}{ours if method.is_ours else peers} | {' | '.join(cells)} |")
    return "\n".join(rows)
