"""Measures all-reduces: decides which cells can run, groups them to fit into memory, and computes the table's rows."""

from __future__ import annotations

import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hpctrain.bench.all_reduce.bandwidth import algorithm_bandwidth, bound_bytes, bound_seconds, bus_bandwidth
from hpctrain.bench.all_reduce.cells import CellResult, CellTimer
from hpctrain.bench.spread import Spread, spread_of
from hpctrain.comm import Collective, all_gather_json
from hpctrain.errors import UsageError
from hpctrain.reduce import ELEMENT_BYTES, BucketReducer
from hpctrain.topology import Topology

# (algorithm, wire) -> a reducer whose messages are separate from those of other reducers. Collective. Raises
# UsageError, the same on every rank, if the combination cannot run here.
MakeReducer = Callable[[str, str], BucketReducer]
# (algorithm, wire, bytes) -> the algorithm that runs; None: the reducer's own.
RunsFor = Callable[[str, str, int], str | None]

# Memory of a reducer, in sizes of its buckets: the buckets, and somewhat more than that for encoded data.
COPIES = 2.5
SHARE_OF_MEMORY = 0.5
SHARE_OF_SHARED = 0.8  # of /dev/shm, where the ranks of a node share their buckets
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceAsked:
    """Settings of the measurement. sizes_bytes: sizes of float32 gradients, ascending. Raises UsageError."""

    sizes_bytes: tuple[int, ...]
    algorithms: tuple[str, ...]
    wires: tuple[str, ...]
    repeats: int = 10
    warmup: int = 2
    in_flight: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for num_bytes in self.sizes_bytes:
            if num_bytes % ELEMENT_BYTES:
                raise UsageError(
                    f"--sizes: {num_bytes} bytes are not a whole number of float32 ({ELEMENT_BYTES} bytes each)"
                )
        if self.repeats < 1 or self.warmup < 0 or self.in_flight < 1:
            raise UsageError(
                f"{self.repeats} repeats, {self.warmup} warm-up rounds, {self.in_flight} in flight: give at least 1 "
                "repeat, 0 warm-up rounds and 1 in flight"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of the table. runs, wire_runs: the algorithm and wire format that ran. Bandwidths are in bytes/s.

    bound_bytes_per_node, bound_s: None if there is no bound.
    """

    algorithm: str
    runs: str
    wire: str
    wire_runs: str
    num_bytes: int
    seconds: Spread
    algbw: float
    busbw: float
    sent_bytes_per_node: float
    bound_bytes_per_node: float | None
    bound_s: float | None
    relative_error: float
    samples_s: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "algorithm_run": self.runs,
            "wire": self.wire,
            "wire_run": self.wire_runs,
            "bytes": self.num_bytes,
            "elements": self.num_bytes // ELEMENT_BYTES,
            "seconds": self.seconds.as_json(),
            "algbw_bytes_per_s": self.algbw,
            "busbw_bytes_per_s": self.busbw,
            "sent_bytes_per_node": self.sent_bytes_per_node,
            "bound_bytes_per_node": self.bound_bytes_per_node,
            "bound_seconds": self.bound_s,
            "relative_error": self.relative_error,
            "samples_s": list(self.samples_s),
        }


@dataclass(slots=True)
class AllReduceMeasured:
    rows: list[Row]
    notes: list[str]


def measure_all_reduce(
    asked: AllReduceAsked,
    make: MakeReducer,
    *,
    comm: Collective,
    topology: Topology,
    device: torch.device,
    link_bytes_per_s: float | None = None,
    progress: Callable[[float], None] = lambda share: None,
    memory_bytes: float | None = None,
    runs: RunsFor = lambda algorithm, wire, num_bytes: None,
) -> AllReduceMeasured:
    """Measures every cell that can run here. Collective; returns the same value on every rank.

    A note is added for each combination that cannot run, or that would run as another one. memory_bytes: limit for the
    buckets of this rank; default: half of the free memory, divided by the host's ranks. If the reducers do not all fit,
    they are measured in groups, one after another, and a note says so. runs: the algorithm that a reducer selects for
    a size, if that depends on the size. Raises UsageError if none of the combinations can run.
    """
    notes: list[str] = []
    pairs = [(algorithm, wire) for wire in asked.wires for algorithm in asked.algorithms]
    each = int(COPIES * asked.in_flight * sum(asked.sizes_bytes))
    free = memory_bytes if memory_bytes is not None else _memory_for_buckets(comm)
    groups = list(groups_that_fit(pairs, bytes_each=each, budget_bytes=free))
    if len(groups) > 1:
        notes.append(
            f"memory holds the buffers of {len(groups[0])} of {len(pairs)} reducers at once: they are measured in "
            f"{len(groups)} groups, one after another, shuffled only within a group"
        )
    rows: list[Row] = []
    left_out: dict[str, list[tuple[str, str]]] = {}
    for number, group in enumerate(groups):
        reducers = _make(group, make, left_out=left_out)
        if not reducers:
            continue
        timer = CellTimer(
            reducers, sizes_bytes=asked.sizes_bytes, comm=comm, topology=topology, device=device,
            in_flight=asked.in_flight, seed=asked.seed + number,
            progress=lambda share, done=number: progress((done + share) / len(groups)),  # type: ignore[misc]
        )  # fmt: skip
        timer.plan()
        measured = timer.measure(repeats=asked.repeats, warmup=asked.warmup)
        rows += [
            row_of(
                found, reducers[found.cell.algorithm, found.cell.wire], topology=topology, asked=asked,
                link_bytes_per_s=link_bytes_per_s,
                runs=runs(found.cell.algorithm, found.cell.wire, found.cell.num_bytes),
            )
            for found in measured
        ]  # fmt: skip
        for reducer in reducers.values():
            reducer.close()
    notes += notes_of(left_out)
    if not rows:
        raise UsageError("nothing that was asked for can run here: " + "; ".join(notes), agreed=True)
    order = {pair: place for place, pair in enumerate(pairs)}
    rows.sort(key=lambda row: (row.num_bytes, order[row.algorithm, row.wire]))
    return AllReduceMeasured(rows, notes)


def groups_that_fit(
    pairs: Sequence[tuple[str, str]], *, bytes_each: int, budget_bytes: float
) -> Iterator[list[tuple[str, str]]]:
    """Yields the pairs in as few groups as memory allows, about equally large; at least one pair per group."""
    at_once = max(1, int(budget_bytes // max(1, bytes_each)))
    num_groups = -(-len(pairs) // at_once)
    for number in range(num_groups):
        begin, end = (len(pairs) * n // num_groups for n in (number, number + 1))
        yield list(pairs[begin:end])


def _memory_for_buckets(comm: Collective) -> float:
    """Memory for one rank's buckets, in bytes, on the host that has least per rank. Collective."""
    free = SHARE_OF_MEMORY * psutil.virtual_memory().available
    if _SHARED_MEMORY.is_dir():
        free = min(free, SHARE_OF_SHARED * shutil.disk_usage(_SHARED_MEMORY).free)
    found = all_gather_json(comm, [socket.gethostname(), free])
    ranks_on = Counter(host for host, _ in found)
    return min(available / ranks_on[host] for host, available in found)


def _make(
    pairs: Sequence[tuple[str, str]], make: MakeReducer, *, left_out: dict[str, list[tuple[str, str]]]
) -> dict[tuple[str, str], BucketReducer]:
    """Returns the reducers that can run here. Adds the other pairs to `left_out`, by reason."""
    reducers: dict[tuple[str, str], BucketReducer] = {}
    for algorithm, wire in pairs:
        try:
            reducers[algorithm, wire] = make(algorithm, wire)
        except UsageError as error:
            left_out.setdefault(str(error), []).append((algorithm, wire))
    return reducers


def notes_of(left_out: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """One line per reason, for example `not measured: ring, direct (fp32, fp16): ...`."""
    lines = []
    for reason, pairs in left_out.items():
        by_wires: dict[str, list[str]] = {}
        for algorithm in dict.fromkeys(algorithm for algorithm, _ in pairs):
            wires = ", ".join(wire for name, wire in pairs if name == algorithm)
            by_wires.setdefault(wires, []).append(algorithm)
        names = "; ".join(f"{', '.join(algorithms)} ({wires})" for wires, algorithms in by_wires.items())
        lines.append(f"not measured: {names}: {reason}")
    return lines


def row_of(
    measured: CellResult,
    reducer: BucketReducer,
    *,
    topology: Topology,
    asked: AllReduceAsked,
    link_bytes_per_s: float | None,
    runs: str | None = None,
) -> Row:
    """Returns the row of a cell. With several buckets in flight, bytes and time are those of all of them together."""
    cell, count = measured.cell, asked.in_flight
    seconds = spread_of(measured.samples_s)
    num_bytes = cell.num_bytes * count
    bound = bound_bytes(cell.num_elements * count, wire=reducer.wire, num_nodes=topology.num_nodes)
    bound_s = None
    if link_bytes_per_s is not None:
        bound_s = bound_seconds(
            cell.num_elements * count, wire=reducer.wire, num_nodes=topology.num_nodes,
            link_bytes_per_s=link_bytes_per_s,
        )  # fmt: skip
    return Row(
        algorithm=cell.algorithm,
        runs=runs or reducer.algorithm,
        wire=cell.wire,
        wire_runs=reducer.wire,
        num_bytes=cell.num_bytes,
        seconds=seconds,
        algbw=algorithm_bandwidth(num_bytes, seconds=seconds.median),
        busbw=bus_bandwidth(num_bytes, seconds=seconds.median, num_ranks=topology.num_ranks),
        sent_bytes_per_node=measured.sent_bytes_per_node,
        bound_bytes_per_node=bound,
        bound_s=bound_s,
        relative_error=measured.relative_error,
        samples_s=measured.samples_s,
    )
