"""Gradient reduction on one node and on four, compared with peers that take turns with it in one run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from benchmarks.harness import Bench, Part, Suite
from benchmarks.places import OnCluster, OneNode
from benchmarks.results_file import Record, over_rounds, ratio_record
from benchmarks.results_page import markdown, spread

Choice = tuple[str, str]
ALGORITHMS = ("hierarchical", "hierarchical-ring", "hierarchical-flat", "direct", "ring", "flat")
RANKS_PER_NODE = 2
ONE_NODE_RANKS = 2
SEED = 20
MODULE = "benchmarks.reduction.ranks"
# Samples of a rank in a step, by workload.
PER_STEP = {"transformer": 6, "mlp": 16}
# The choices called "ours" in figure 2: selected in trials during development and fixed before a run.
OURS_16: Choice = ("hierarchical-ring", "fp16")
OURS_8: Choice = ("hierarchical-ring", "int8")
# Also shown in figure 2, without bars.
OTHERS: tuple[Choice, ...] = (
    ("hierarchical", "fp32"),
    ("hierarchical", "bf16"),
    ("hierarchical", "fp16"),
    ("hierarchical", "int8"),  # rounds twice; the ring rounds at each rank that a value passes
    ("flat", "fp32"),
)
# Of figure 2. Methods that call MPI_Allreduce are timed again with Open MPI's ring, which on slow links is a third
# faster than Open MPI's own choice for eight ranks (Rabenseifner is not faster; the hierarchical `han` crashes in
# 4.1.4).
FAMILIES = ("ours", "mpi", "horovod", "gloo", "stream")
RING_FAMILIES = ("ours", "mpi", "horovod")
USE_RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
# Of figure 3: plain MPI, with whose parameters `steps.check` compares all others; hpctrain, torch, Horovod.
YIELDING_METHODS = ("mpi-fp32", "ours-fp32", "ours-fp16", "horovod-fp32", "horovod-fp16")
STEP_METHODS = (*YIELDING_METHODS, "ddp-fp32", "ddp-fp16")
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
FIXED: tuple[Choice, ...] = tuple((name, wire) for wire in ("fp32", "fp16") for name in ALGORITHMS)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements. others: choices of figure 2 without bars. budget_s: time for one size in figure 4,
    after which no more rounds begin."""

    bytes_numel: int = 25_000_000
    times_numel: int = 4_194_304  # 16 MiB
    time_rounds: int = 9
    others: tuple[Choice, ...] = OTHERS
    step_rounds: int = 10  # of each start
    steps_per_block: int = 10
    workloads: tuple[str, ...] = tuple(PER_STEP)
    sweep_numels: tuple[int, ...] = tuple(1 << power for power in range(10, 26, 2))  # 4 KiB to 64 MiB
    # The same choice measured twice differs by 10 to 20 % over 15 rounds, so there are as many as fit into the budget.
    sweep_rounds: int = 101
    # `auto` may choose a wire too, never one with fewer than 16 bits; it is compared with both wires.
    auto: Choice = ("auto", "auto")
    budget_s: float = 15.0
    timeout_s: float = 900.0


FULL = Scale()
QUICK = replace(
    FULL, bytes_numel=50_000, times_numel=50_000, time_rounds=1, step_rounds=1, steps_per_block=1,
    workloads=("mlp",), sweep_numels=(1000,), sweep_rounds=3, timeout_s=120.0,
)  # fmt: skip

Measure = Callable[[Bench], list[Record]]


# ---------------------------------------------------------------------- the records

Timed = Mapping[str, Mapping[str, Any]]  # of a method: seconds, node_bytes
Blocks = Sequence[Sequence[Sequence[float]]]  # seconds, (rounds, steps, ranks)
Block = Sequence[Sequence[float]]
Over = Callable[[Sequence[float]], float]  # a step's time, from those of its ranks
# Of a method: `steps`, and the steps `without` communication that alternated with them.
Steps = Mapping[str, Mapping[str, Blocks]]

FP32_PEERS = (
    ("ddp-gloo-fp32", "DDP on Gloo", ("gloo-fp32", "ddp-fp32"), 2.0),
    ("horovod-fp32", "Horovod", ("horovod-fp32",), 2.8),
)
PEERS_16 = ("gloo-fp16", "ddp-fp16", "horovod-fp16")
PEERS = ("mpi-fp32", "horovod-fp32", "horovod-fp16", "gloo-fp32", "gloo-fp16", "ddp-fp32", "ddp-fp16")
STEP_PEERS = {32: ("mpi-fp32", "ddp-fp32", "horovod-fp32"), 16: ("ddp-fp16", "horovod-fp16")}

# Suffix of methods in figure 2 that were measured with Open MPI's ring algorithm.
RING = ", ring"
# Suffix of methods in figure 3 whose ranks yielded their core while waiting for MPI.
YIELDING = ", yielding"


def bytes_records(
    found: Timed, *, numel: int, elem_bytes: int, num_nodes: int, ranks_per_node: int
) -> list[Record]:
    """Returns the records of figure 1: bytes that left the node that sent most / the algorithm's bound."""
    records = []
    for choice, counted in found.items():
        if choice == "pause":
            continue
        algorithm = choice.partition("/")[0]
        bound = bytes_out_of_a_node(
            algorithm, numel=numel, elem_bytes=elem_bytes, num_nodes=num_nodes, ranks_per_node=ranks_per_node
        )
        records.append(
            Record(
                id=f"reduction.1.{algorithm}",
                what=f"bytes that left a node / the bound, {bound / 1e6:.1f} MB, fp16, {algorithm}",
                value=max(counted["node_bytes"]) / bound, bar=1.10, sense="at most", unit="bytes/bytes",
                samples={
                    "bytes_of_each_node": counted["node_bytes"],
                    "bound_bytes": bound,
                    "seconds": counted["seconds"],
                    "idle_bytes_of_each_node": found["pause"]["node_bytes"],
                    "idle_seconds": found["pause"]["seconds"],
                },
            )
        )  # fmt: skip
    return records


def times(found: Timed, name: str) -> list[float]:
    return list(found[name]["seconds"])


def _with_ring(found: Timed, names: Sequence[str]) -> list[str]:
    """Returns the methods and, if they were timed, the same methods with Open MPI's ring."""
    return [name for name in found if name.removesuffix(RING) in names]


def best_of(found: Timed, names: Sequence[str]) -> str:
    """Returns the method with the smallest median time."""
    return min(names, key=lambda name: median(times(found, name)))


def time_records(
    found: Timed, *, rate: str, ours_16: str, ours_8: str, bound_bytes: float, stream_bytes: int, full: bool,
) -> list[Record]:  # fmt: skip
    """Returns the records of figure 2 at one link rate. full: all bars; otherwise only that no peer is faster.

    Each value is a ratio of medians; its samples are the times of both methods.
    """
    stem = f"reduction.2.{rate}"

    def ratio(name: str, *, what: str, peer: str, ours: str, bar: float) -> Record:
        theirs, mine = times(found, peer), times(found, ours)
        return ratio_record(
            f"{stem}.{name}", f"{rate}: {what} ({peer} / {ours})", theirs, mine, bar=bar, unit="times as fast",
            samples={f"{peer} s": theirs, f"{ours} s": mine}, of_medians=True,
            same_rounds=not peer.endswith(RING),  # Open MPI's ring was measured in another launch
        )  # fmt: skip

    everything = {"seconds of all": {name: times(found, name) for name in found}}
    best, best_16 = best_of(found, _with_ring(found, PEERS)), best_of(found, _with_ring(found, PEERS_16))
    if not full:
        record = ratio("best-peer", what="the best peer / ours, 16 bits", peer=best, ours=ours_16, bar=1.0)
        return [replace(record, samples=everything)]
    stream_rate = stream_bytes / median(times(found, "stream"))
    records = [
        Record(
            id=f"{stem}.bound",
            what=f"{rate}: ours, 16 bits / the bound's bytes at the rate of a plain MPI stream, "
            f"{stream_rate * 8 / 1e6:.0f} Mbit/s",
            value=median(times(found, ours_16)) * stream_rate / bound_bytes,
            bar=1.2,
            sense="at most",
            unit="s/s",
            samples={"stream bytes": stream_bytes, "bound bytes": bound_bytes, **everything},
            # The stream is timed twice per round.
            **over_rounds(times(found, ours_16), times(found, "stream"), same_rounds=False),
        ),
        ratio("best-16-bit-peer", what="the best 16-bit peer / ours, 16 bits", peer=best_16, ours=ours_16, bar=1.1),
    ]  # fmt: skip
    rows = [*FP32_PEERS]
    if f"horovod-fp32{RING}" in found:
        rows.append(("horovod-fp32.ring", "Horovod with Open MPI's ring", (f"horovod-fp32{RING}",), 2.8))
    for name, label, names, bar in rows:
        peer = best_of(found, names)
        records.append(
            ratio(
                name, what=f"{label} in fp32 / ours, 16 bits", peer=peer, ours=ours_16, bar=bar,
            )
        )  # fmt: skip
    return [
        *records,
        ratio("8-bit", what="the best peer / ours, 8 bits", peer=best, ours=ours_8, bar=1.8),
    ]


def exposed(found: Mapping[str, Steps], name: str, *, over: Over = max) -> list[float]:
    """Returns for each round the exposed communication in seconds: the median of a step's time minus that of the step
    without communication that was measured next to it.

    over: how the ranks' times of a step are combined. `max`: the time of the slowest rank. `fmean`: the mean over the
    ranks, so that waiting for a rank that computes longer counts as communication.
    """
    if _has_thread(name):
        return [step_s([a], over=over) - step_s(b, over=over) for a, b in _with_baseline(found, name)]
    both = zip(found[name]["steps"], found[name]["without"], strict=True)
    return [median(over(a) - over(b) for a, b in zip(steps, without, strict=True)) for steps, without in both]


def slowdown(found: Mapping[str, Steps], name: str) -> float:
    """Returns a step's time / the time of the same round's steps without communication: the median over the rounds."""
    return median(step_s([steps]) / step_s(without) for steps, without in _with_baseline(found, name))


def _with_baseline(found: Mapping[str, Steps], name: str) -> list[tuple[Block, Blocks]]:
    """Returns for each round a method's steps, and the steps without communication that they are compared with.

    Horovod's thread also slows the steps without communication that alternate with Horovod's own, often more than
    those. Horovod is therefore compared with the steps without communication that alternated with the other methods'
    steps, in the same round and processes.
    """
    others = [name]
    if _has_thread(name):
        others = [other for other in found if not _has_thread(other) and _yielding(other) == _yielding(name)]
    return [
        (steps, [found[other]["without"][number] for other in others])
        for number, steps in enumerate(found[name]["steps"])
    ]


def _has_thread(name: str) -> bool:
    return name.startswith("horovod")


def _yielding(name: str) -> bool:
    return name.endswith(YIELDING)


def step_s(blocks: Blocks, *, over: Over = max) -> float:
    return median(over(step) for block in blocks for step in block)


def step_records(found: Mapping[str, Steps], *, samples_per_step: Mapping[str, int]) -> list[Record]:
    """Returns the records of figure 3. The bars are set for the transformer; the MLP is shown with the same bars.

    hpctrain's ranks run as `hpctrain launch` starts them; of a peer the better of this and yielding counts.
    """
    records = []
    for workload, of in found.items():
        stem = f"reduction.3.{workload}"
        ours = min(("ours-fp32", "ours-fp16"), key=lambda name: median(exposed(of, name)))
        peers_of = {
            bits: [name for name in of if name.removesuffix(YIELDING) in STEP_PEERS[bits]]
            for bits in STEP_PEERS
        }
        peers = [*peers_of[32], *peers_of[16]]
        rows: list[tuple[str, str, list[str], Over]] = [("exposed", ours, peers, max)]
        rows += [(f"exposed.fp{bits}", f"ours-fp{bits}", peers_of[bits], max) for bits in (32, 16)]
        rows += [("exposed.mean", ours, peers, fmean)]
        for name, mine, others, over in rows:
            ms = {n: exposed(of, n, over=over) for n in (mine, *others)}
            peer = min(others, key=lambda other: median(ms[other]))
            records.append(
                Record(
                    id=f"{stem}.{name}",
                    what=f"{workload}: exposed communication{', mean over the ranks' if over is fmean else ''}, "
                    f"{mine} / {peer} ({1e3 * median(ms[mine]):.1f} / {1e3 * median(ms[peer]):.1f} ms)",
                    value=median(ms[mine]) / median(ms[peer]), bar=0.6, sense="at most", unit="s/s",
                    samples={"exposed s": ms, **({"steps s": of} if name == "exposed" else {})},
                )
            )  # fmt: skip
        records += _throughput_records(
            of, workload=workload, ours=ours, peers=peers, count=samples_per_step[workload]
        )
    return records


def _throughput_records(
    of: Mapping[str, Steps], *, workload: str, ours: str, peers: Sequence[str], count: int
) -> list[Record]:
    """Returns two records of samples/s: one computed from the methods' slow-downs, one from the medians of their steps.

    The machine's speed changes between two methods' blocks by more than the methods differ, so that medians of steps
    with communication can be smaller than those without. The slow-down compares steps of the same round.
    """
    medians = {name: step_s(blocks["steps"]) for name, blocks in of.items()}
    without = {name: step_s(blocks["without"]) for name, blocks in of.items()}
    slowed = {name: slowdown(of, name) for name in of}
    launched = [name for name in of if not _yielding(name)]
    plain = step_s([block for name in launched if not _has_thread(name) for block in of[name]["without"]])
    all_methods = {"slowed by": slowed, "median step s": medians, "without communication s": without}
    records = []
    for name, what, seconds, samples in (
        (
            "throughput",
            "samples/s by slowdown",
            {name: plain * by for name, by in slowed.items()},
            all_methods,
        ),
        (
            "throughput.medians",
            "samples/s by the median step",
            {name: medians[name] for name in launched},
            {"median step s": medians},
        ),
    ):
        peer = min((name for name in peers if name in seconds), key=seconds.__getitem__)
        records.append(
            Record(
                id=f"reduction.3.{workload}.{name}",
                what=f"{workload}: {what}, {ours} / {peer} ({count / seconds[ours]:.1f} / "
                f"{count / seconds[peer]:.1f})",
                value=seconds[peer] / seconds[ours], bar=1.0, sense="at least", unit="samples/samples",
                samples=samples,
            )
        )  # fmt: skip
    return records


def sweep_records(found: Mapping[str, Mapping[str, Any]], *, place: str, auto: str) -> list[Record]:
    """Returns the records of figure 4 at one place: `auto` / the best fixed choice for each size, and the worst
    size."""
    records = []
    for numel, one in found.items():
        of: Mapping[str, Sequence[float]] = one["times"]
        rounds = len(of[auto])
        # A choice that was dropped after the first rounds, because it was slow, has fewer samples.
        fixed = {name: median(s) for name, s in of.items() if name != auto and len(s) == rounds}
        best = min(fixed, key=lambda name: fixed[name])
        size = size_name(4 * int(numel))
        records.append(
            Record(
                id=f"reduction.4.{place}.{size}", what=f"{place}, {size}: auto / {best}",
                value=median(of[auto]) / fixed[best], bar=1.10, sense="at most", unit="s/s",
                samples={
                    "auto runs": one["runs"],
                    "seconds": {name: list(seconds) for name, seconds in of.items()},
                },
            )
        )  # fmt: skip
    return records


def size_name(num_bytes: int) -> str:
    return f"{num_bytes >> 20}MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10}KiB"


# ---------------------------------------------------------------------- the bounds

# Algorithms that sum within the node first: a node then sends as many bytes as a single rank would.
TWO_LEVEL = ("hierarchical", "hierarchical-ring", "hierarchical-flat")


def bytes_out_of_a_node(
    algorithm: str, *, numel: int, elem_bytes: float, num_nodes: int, ranks_per_node: int
) -> float:
    """Returns the bytes of payload that leave each node when `numel` elements of `elem_bytes` bytes are summed.

    two levels: 2 (C-1)/C n b for C nodes: reduce-scatter and all-gather between nodes.
    ring over P ranks: 2 (P-1)/P n b from each rank to its neighbour; one rank of a node has its neighbour
        on another node.
    direct over P ranks, R on a node: each rank sends n/P elements to each of the P-R ranks on other nodes, twice.
    flat: in fp32 the library's own algorithm, compared with the bound of the ring. MPI has no 16-bit floats, so the
        backend exchanges slices and gathers the sums, as direct does.
    Raises ValueError for an unknown algorithm.
    """
    num_ranks = num_nodes * ranks_per_node
    whole = numel * elem_bytes
    if algorithm in TWO_LEVEL:
        return 2 * (num_nodes - 1) / num_nodes * whole
    if algorithm == "flat":
        algorithm = "ring" if elem_bytes >= 4 else "direct"
    if algorithm == "ring":
        return 2 * (num_ranks - 1) / num_ranks * whole if num_nodes > 1 else 0.0
    if algorithm == "direct":
        return 2 * ranks_per_node * (num_ranks - ranks_per_node) / num_ranks * whole
    raise ValueError(f"no bound is known for the algorithm {algorithm!r}")


# ---------------------------------------------------------------------- the page


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the times of all methods."""
    found = {}
    for record in content["records"]:
        samples, place = record["samples"], record["id"].split(".")[2]
        if record["id"].startswith("reduction.2.") and "seconds of all" in samples:
            found[f"times.{place}"] = _table_of_times(samples["seconds of all"])
        if record["id"].startswith("reduction.3.") and "slowed by" in samples:
            found[f"steps.{place}"] = _table_of_steps(samples)
    return found


def _table_of_times(seconds: Mapping[str, Sequence[float]]) -> str:
    ms = {name: [1000 * value for value in seconds[name]] for name in seconds}
    return markdown(
        ("", "median ms", "fastest", "slowest"),
        ([name, *spread(ms[name], ".1f")] for name in sorted(ms, key=lambda name: median(ms[name]))),
    )


def _table_of_steps(samples: Mapping[str, Mapping[str, float]]) -> str:
    slowed = samples["slowed by"]
    steps, without = samples["median step s"], samples["without communication s"]
    return markdown(
        ("", "slowed by", "median step, ms", "without communication, alternating, ms"),
        (
            [name, f"{slowed[name] - 1:.1%}", f"{1000 * steps[name]:.1f}", f"{1000 * without[name]:.1f}"]
            for name in sorted(slowed, key=lambda name: slowed[name])
        ),
    )


# ---------------------------------------------------------------------- the suite


def _bytes(bench: Bench) -> list[Record]:
    place = _cluster(bench, "1gbit")
    settings = {
        "numel": bench.scale.bytes_numel,
        "choices": [(name, "fp16") for name in ALGORITHMS],
        "pause_s": 2.0,
    }
    found = place.run("counted_bytes", settings, timeout_s=bench.scale.timeout_s)
    return bytes_records(
        found, numel=bench.scale.bytes_numel, elem_bytes=2, num_nodes=place.num_nodes,
        ranks_per_node=RANKS_PER_NODE,
    )  # fmt: skip


def _times(rate: str, *, full: bool) -> Measure:
    def measure(bench: Bench) -> list[Record]:
        place, scale = _cluster(bench, rate), bench.scale
        bound = bytes_out_of_a_node(
            OURS_16[0], numel=scale.times_numel, elem_bytes=2, num_nodes=place.num_nodes,
            ranks_per_node=RANKS_PER_NODE,
        )  # fmt: skip
        settings: dict[str, Any] = {
            "numel": scale.times_numel, "choices": [OURS_16, OURS_8, *scale.others], "stream_bytes": int(bound),
            "num_rounds": scale.time_rounds, "seed": SEED,
        }  # fmt: skip
        found = place.run("buffers", {**settings, "families": FAMILIES}, timeout_s=scale.timeout_s)
        again = {**settings, "families": RING_FAMILIES, "choices": [OURS_16]}
        with_ring = place.run("buffers", again, timeout_s=scale.timeout_s, variables=USE_RING)
        found |= {f"{name}{RING}": samples for name, samples in with_ring.items()}
        return time_records(
            found, rate=rate, ours_16="/".join(OURS_16), ours_8="/".join(OURS_8), bound_bytes=bound,
            stream_bytes=int(bound), full=full,
        )  # fmt: skip

    return measure


def _steps(bench: Bench) -> list[Record]:
    """Measures training steps: with ranks as `hpctrain launch` starts them, and methods that use MPI again with ranks
    that yield while they wait, which is faster for Horovod. hpctrain is measured in both settings too."""
    place, scale = _one_node(bench), bench.scale
    found: dict[str, dict[str, Any]] = {name: {} for name in scale.workloads}
    for suffix, methods, variables in (("", STEP_METHODS, {}), (YIELDING, YIELDING_METHODS, YIELD)):
        settings = {
            "workloads": list(scale.workloads), "num_rounds": scale.step_rounds, "block": scale.steps_per_block,
            "seed": SEED, "methods": methods,
        }  # fmt: skip
        one = place.run("training_steps", settings, timeout_s=scale.timeout_s, variables=variables)
        for workload, of in one.items():
            found[workload] |= {f"{method}{suffix}": times for method, times in of.items()}
    return step_records(
        found, samples_per_step={name: ONE_NODE_RANKS * PER_STEP[name] for name in scale.workloads}
    )


def _sweep(rate: str | None) -> Measure:
    def measure(bench: Bench) -> list[Record]:
        place, scale = _one_node(bench) if rate is None else _cluster(bench, rate), bench.scale
        settings = {
            "choices": FIXED, "auto": scale.auto, "numels": list(scale.sweep_numels),
            "num_rounds": scale.sweep_rounds, "budget_s": scale.budget_s, "seed": SEED,
        }  # fmt: skip
        found = place.run("sweep", settings, timeout_s=scale.timeout_s)
        return sweep_records(found, place=rate or "one-node", auto="/".join(scale.auto))

    return measure


def _one_node(bench: Bench) -> OneNode:
    return bench.one_node(
        MODULE, num_ranks=ONE_NODE_RANKS, variables=dict(getattr(bench.options, "variable", ()))
    )


def _cluster(bench: Bench, rate: str) -> OnCluster:
    variables = dict(getattr(bench.options, "variable", ()))
    return bench.on_cluster(MODULE, rate=rate, ranks_per_node=RANKS_PER_NODE, variables=variables)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variable", type=_variable, action="append", default=[], metavar="NAME=VALUE",
        help="environment variable of the ranks, for all methods: OMPI_MCA_mpi_yield_when_idle=1; may be repeated",
    )  # fmt: skip


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


SUITE = Suite(
    name="reduction", about=__doc__,
    parts=(
        Part(figures=("1",), title="bytes out of a node", measure=_bytes),
        Part(figures=("2",), title="16 MB at 200 Mbit/s", measure=_times("200mbit", full=True)),
        Part(figures=("2",), title="16 MB at 1 Gbit/s", measure=_times("1gbit", full=False)),
        Part(figures=("3",), title="training steps on one node", measure=_steps),
        Part(figures=("4",), title="auto on one node", measure=_sweep(None)),
        Part(figures=("4",), title="auto at 1 Gbit/s", measure=_sweep("1gbit")),
        Part(figures=("4",), title="auto at 200 Mbit/s", measure=_sweep("200mbit")),
    ),
    full=FULL, quick=QUICK, tables=tables, options=_options,
)  # fmt: skip
