"""From measurements to records: which number is held against which bar. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from benchmarks.reduction.bounds import bytes_out_of_a_node
from benchmarks.results_file import Record

Timed = Mapping[str, Mapping[str, Any]]  # of a method: bits, seconds, node_bytes
Blocks = Sequence[Sequence[Sequence[float]]]  # seconds, (rounds, steps, ranks)
Block = Sequence[Sequence[float]]
Over = Callable[[Sequence[float]], float]  # a step's time, from those of its ranks
# Of a method: `steps`, and those `without` communication that were made in turn with them.
Steps = Mapping[str, Mapping[str, Blocks]]

FP32_PEERS = (
    ("ddp-gloo-fp32", "DDP on Gloo", ("gloo-fp32", "ddp-fp32"), 2.0),
    ("horovod-fp32", "Horovod", ("horovod-fp32",), 2.8),
)
PEERS_16 = ("gloo-fp16", "ddp-fp16", "horovod-fp16")
PEERS = ("mpi-fp32", "horovod-fp32", "horovod-fp16", "gloo-fp32", "gloo-fp16", "ddp-fp32", "ddp-fp16")
STEP_PEERS = {32: ("mpi-fp32", "ddp-fp32", "horovod-fp32"), 16: ("ddp-fp16", "horovod-fp16")}

# Ends the name of a method in figure 2 for which Open MPI was set to its ring.
RING = ", ring"
# Ends the name of a method in figure 3 whose ranks yielded while they waited for MPI.
YIELDING = ", yielding"


def bytes_records(
    found: Timed, *, numel: int, elem_bytes: int, num_nodes: int, ranks_per_node: int
) -> list[Record]:
    """Figure 1: what left the node that sent most, against each algorithm's own bound."""
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
                value=max(counted["node_bytes"]) / bound,
                bar=1.10,
                sense="at most",
                unit="bytes/bytes",
                samples={
                    "bytes_of_each_node": counted["node_bytes"],
                    "bound_bytes": bound,
                    "seconds": counted["seconds"],
                    "idle_bytes_of_each_node": found["pause"]["node_bytes"],
                    "idle_seconds": found["pause"]["seconds"],
                },
            )
        )
    return records


def times(found: Timed, name: str) -> list[float]:
    return list(found[name]["seconds"])


def _with_ring(found: Timed, names: Sequence[str]) -> list[str]:
    """Those methods, and the same with Open MPI's ring where that was timed."""
    return [name for name in found if name.removesuffix(RING) in names]


def best_of(found: Timed, names: Sequence[str]) -> str:
    """The method with the smallest median."""
    return min(names, key=lambda name: median(times(found, name)))


def time_records(
    found: Timed,
    *,
    rate: str,
    ours_16: str,
    ours_8: str,
    bound_bytes: float,
    stream_bytes: int,
    full: bool,
) -> list[Record]:
    """Figure 2 at one rate. full: all bars; else only that no peer is faster.

    Each ratio is one of medians; its samples are the times of both sides.
    """
    stem = f"reduction.2.{rate}"

    def ratio(name: str, *, what: str, peer: str, ours: str, bar: float) -> Record:
        return Record(
            id=f"{stem}.{name}",
            what=f"{rate}: {what} ({peer} / {ours})",
            value=median(times(found, peer)) / median(times(found, ours)),
            bar=bar,
            sense="at least",
            unit="times as fast",
            samples={f"{peer} s": times(found, peer), f"{ours} s": times(found, ours)},
        )

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
            samples={                     "stream bytes": stream_bytes, "bound bytes": bound_bytes, **everything},
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
    """Of each round the median of step minus the step without communication that was made beside it.

    over: `max`, a step is as long as that of its slowest rank; `fmean`, as the mean over the ranks, so that what one
    rank waits for another that computes longer counts as communication.
    """
    if _has_thread(name):
        return [step_s([a], over=over) - step_s(b, over=over) for a, b in _beside(found, name)]
    both = zip(found[name]["steps"], found[name]["without"], strict=True)
    return [median(over(a) - over(b) for a, b in zip(steps, without, strict=True)) for steps, without in both]


def slowdown(found: Mapping[str, Steps], name: str) -> float:
    """A step's time over that of the steps without communication beside it: median over the rounds."""
    return median(step_s([steps]) / step_s(without) for steps, without in _beside(found, name))


def _beside(found: Mapping[str, Steps], name: str) -> list[tuple[Block, Blocks]]:
    """Of each round a method's steps, and those without communication made in turn with them.

    Horovod's thread takes time from these as well, often more than from its own steps: it is held against those that
    alternated with the other methods' steps in the same round, in the same processes.
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
    """Figure 3: the transformer has bars; the MLP is shown with the same ones.

    Ours is as `hpctrain launch` starts it, a peer as it does best: so, or yielding.
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
                    value=median(ms[mine]) / median(ms[peer]),
                    bar=0.6,
                    sense="at most",
                    unit="s/s",
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
    """Samples/s by how much a method slows what is made in turn with it; and by the plain medians.

    The machine changes from one method's block to the next by more than the methods differ: medians of steps with
    communication then come out shorter than those without. So these are compared among the same processes only.
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
                value=seconds[peer] / seconds[ours],
                bar=1.0,
                sense="at least",
                unit="samples/samples",
                samples=samples,
            )
        )
    return records


def sweep_records(found: Mapping[str, Mapping[str, Any]], *, place: str, auto: str) -> list[Record]:
    """Figure 4 at one place: `auto` against the best fixed choice of each size, and the worst size."""
    records = []
    for numel, one in found.items():
        of: Mapping[str, Sequence[float]] = one["times"]
        rounds = len(of[auto])
        # A choice that was dropped after the first rounds has not been timed as often: it was slow.
        fixed = {name: median(s) for name, s in of.items() if name != auto and len(s) == rounds}
        best = min(fixed, key=lambda name: fixed[name])
        size = size_name(4 * int(numel))
        records.append(
            Record(
                id=f"reduction.4.{place}.{size}",
                what=f"{place}, {size}: auto / {best}",
                value=median(of[auto]) / fixed[best],
                bar=1.10,
                sense="at most",
                unit="s/s",
                samples={
                    "auto runs": one["runs"],
                    "seconds": {name: list(seconds) for name, seconds in of.items()},
                },
            )
        )
    return records


def size_name(num_bytes: int) -> str:
    return f"{num_bytes >> 20}MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10}KiB"
