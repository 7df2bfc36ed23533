"""Measures all-reduces. A cell of the table is one combination of size, algorithm and wire format.

Decides which cells can run, groups them to fit into memory, times them, and computes the table's rows.
"""

from __future__ import annotations

import math
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, final

import psutil
import torch

from hpctrain.bench.figures import Spread, spread_of
from hpctrain.comm import Collective, ReduceOp, all_gather_json
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.reduce import ELEMENT_BYTES, Bucket, BucketReducer, Slot, codec_named, run_to_end
from hpctrain.topology import Topology

# Bandwidths of an all-reduce as defined by nccl-tests, and the lower bound on its traffic between nodes.
#
# Source of the definitions: NVIDIA nccl-tests, doc/PERFORMANCE.md. Of the bound: Patarasuk and Yuan 2009,
# Bandwidth optimal all-reduce algorithms for clusters of workstations, theorem 1, applied to nodes instead
# of processes.


def algorithm_bandwidth(num_bytes: int, *, seconds: float) -> float:
    """Returns the bytes of gradients divided by the time, in bytes/s; 0 if no time has passed."""
    return num_bytes / seconds if seconds > 0 else 0.0


def bus_bandwidth(num_bytes: int, *, seconds: float, num_ranks: int) -> float:
    """Returns the algorithm bandwidth times 2 (N-1)/N in bytes/s: the traffic through each link of a ring of N ranks.

    Unlike the algorithm bandwidth, the bus bandwidth can be compared with the rate of the hardware on any number of
    ranks. It can exceed that rate if the wire format is smaller than the gradients (fp16 for fp32), or if there is less
    traffic than in a flat ring (ranks that share a node).
    """
    return algorithm_bandwidth(num_bytes, seconds=seconds) * 2 * (num_ranks - 1) / num_ranks


def wire_bytes(num_elements: int, *, wire: str) -> int | None:
    """Returns the size in bytes of `num_elements` float32 values in the wire format.

    Returns None if the size depends on the gradients (top-k, low-rank, auto).
    """
    try:
        return codec_named(wire).num_bytes(num_elements)
    except HpctrainError:
        return None


def bound_bytes(num_elements: int, *, wire: str, num_nodes: int) -> float | None:
    """Returns a lower bound on the bytes that leave each of C nodes: 2 (C-1)/C times the size of encoded gradients.

    Returns None if the encoded size depends on the gradients.
    """
    encoded = wire_bytes(num_elements, wire=wire)
    return None if encoded is None else 2 * (num_nodes - 1) / num_nodes * encoded


def bound_seconds(num_elements: int, *, wire: str, num_nodes: int, link_bytes_per_s: float) -> float | None:
    """Returns the seconds that `bound_bytes` take over one node's link; None if `bound_bytes` is None or 0."""
    least = bound_bytes(num_elements, wire=wire, num_nodes=num_nodes)
    return None if not least else least / link_bytes_per_s


# Times the cells of the all-reduce table. A cell is a combination of size, algorithm and wire format.


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination of algorithm, wire format and size to measure. `num_bytes`: the size of the float32 gradients."""

    algorithm: str
    wire: str
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return self.num_bytes // ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """The result of one cell: of one combination of size, algorithm and wire format. The same on every rank.

    Attributes:
        samples_s: For each repeat, the seconds of the slowest rank.
        sent_bytes_per_node: The payload bytes that a node sent per reduction; the largest value of all nodes.
        relative_error: The error of the last reduction on the worst rank: the largest difference from the float64 sum,
            divided by the largest absolute value of that sum. The error includes the error feedback of earlier
            reductions.
    """

    cell: Cell
    samples_s: tuple[float, ...]
    sent_bytes_per_node: float
    relative_error: float


def bucket_of(num_elements: int, *, number: int = 0, position: int = 0) -> Bucket:
    """Returns a bucket of exactly `num_elements` float32 values, two of which are flags that gradients were used.

    The other values are the largest square matrix that fits, and a vector of the rest. The matrix is there because
    low-rank wire formats send only matrices as factors; for other formats the matrix makes no difference. There is no
    padding before the flags, so that 4 KB in the table are 4 KB. A small bucket has only a vector and one flag.
    """
    side = math.isqrt(max(0, num_elements - 2))
    numels = [num_elements - 1] if side < 4 else [side * side, num_elements - 2 - side * side]
    slots = []
    offset = 0
    for place, numel in enumerate(numels):
        shape = (side, side) if numel == side * side else (numel,)
        used_flag = num_elements - len(numels) + place
        slots.append(
            Slot(
                number + place,
                offset=offset,
                numel=numel,
                used_flag=used_flag,
                position=position + offset,
                shape=shape,
            )
        )
        offset += numel
    return Bucket(torch.float32, tuple(slots), num_elements)


def buckets_of(sizes_bytes: Sequence[int], *, in_flight: int = 1) -> list[Bucket]:
    """Returns `in_flight` buckets of each size, one size after another."""
    buckets: list[Bucket] = []
    number = position = 0
    for num_bytes in sizes_bytes:
        for _ in range(in_flight):
            bucket = bucket_of(num_bytes // ELEMENT_BYTES, number=number, position=position)
            buckets.append(bucket)
            number += len(bucket.slots)
            position += bucket.num_gradients
    return buckets


@final
class Gradients:
    """The input of each rank: one random vector, the same on all ranks, times a power of two that depends on the rank.

    Every rank can therefore compute the expected sum.
    """

    def __init__(
        self, *, num_elements: int, rank: int, num_ranks: int, seed: int, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(num_elements, generator=generator)
        factors = [2.0 ** -(r % 4) for r in range(num_ranks)]
        self._mine = (base * factors[rank]).to(device)  # exact
        self._base = base
        self._sum_of_factors = sum(factors)

    def fill(self, memory: torch.Tensor, *, bucket: Bucket) -> None:
        """Writes this rank's gradients, and 1 for the flags, into `memory`: float32, shape (bucket.numel,)."""
        memory.copy_(self._mine[: bucket.numel])
        memory[bucket.first_flag :] = 1

    def relative_error(self, memory: torch.Tensor, *, bucket: Bucket) -> float:
        """Returns the relative error of the sum in `memory`.

        This is the largest difference from the exact sum, divided by the largest absolute value of the exact sum.
        """
        expected = self._base[: bucket.num_gradients].double() * self._sum_of_factors
        if not expected.numel():
            return 0.0
        found = memory[: bucket.num_gradients].cpu().double()
        return float((found - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


@final
class CellTimer:
    """Times several reducers that exist at the same time. The methods are collective over `comm`.

    A cell is one combination of size, algorithm and wire format.

    reducers: by (algorithm, wire format), in the same order on every rank; each reducer has `in_flight` buckets of
    every size.
    progress: called after each reduction with the fraction that is done, 0 to 1.
    """

    def __init__(
        self,
        reducers: Mapping[tuple[str, str], BucketReducer],
        *,
        sizes_bytes: Sequence[int],
        comm: Collective,
        topology: Topology,
        device: torch.device,
        in_flight: int = 1,
        seed: int = 0,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self._reducers = reducers
        self._sizes_bytes = sizes_bytes
        self._comm = comm
        self._topology = topology
        self._device = device
        self._in_flight = in_flight
        self._random = Random(seed)  # the same order on every rank
        self._progress = progress
        self._gradients = Gradients(
            num_elements=max(sizes_bytes) // ELEMENT_BYTES, rank=comm.rank, num_ranks=comm.num_ranks, seed=seed,
            device=device,
        )  # fmt: skip
        self._buckets = buckets_of(sizes_bytes, in_flight=in_flight)
        self._buffers: dict[tuple[str, str], list[torch.Tensor]] = {}

    def plan(self) -> None:
        """Passes the buckets to every reducer. Not part of the constructor, since it communicates."""
        for key, reducer in self._reducers.items():
            self._buffers[key] = reducer.plan(self._buckets, device=self._device)

    def measure(self, *, repeats: int, warmup: int) -> list[CellResult]:
        """Times every combination once per round, in `warmup + repeats` rounds. Warm-up rounds are not counted.

        Each round times the combinations of size, algorithm and wire format in a new random order, so that a drift of
        the machine (other load, clock frequency) affects all combinations evenly.
        """
        cells = [
            Cell(algorithm=algorithm, wire=wire, num_bytes=num_bytes)
            for algorithm, wire in self._reducers
            for num_bytes in self._sizes_bytes
        ]
        mine: list[list[float]] = [[] for _ in cells]
        sent = [0] * len(cells)
        errors = [0.0] * len(cells)
        rounds = warmup + repeats
        for number in range(rounds):
            order = list(range(len(cells)))
            self._random.shuffle(order)
            for place, index in enumerate(order):
                seconds, num_bytes, error = self._reduce(cells[index], check=number == rounds - 1)
                if number == rounds - 1:
                    errors[index] = error
                if number >= warmup:
                    mine[index].append(seconds)
                    sent[index] += num_bytes
                self._progress((number + (place + 1) / len(order)) / rounds)
        times = torch.tensor(mine, dtype=torch.float64).reshape(-1)
        worst = torch.tensor(errors, dtype=torch.float64)
        # A reduction ends when the last rank has the sum.
        self._comm.all_reduce(times, op=ReduceOp.MAX)
        self._comm.all_reduce(worst, op=ReduceOp.MAX)
        by_node = self._sent_by_node(sent)
        return [
            CellResult(
                cell=cell,
                samples_s=tuple(samples),
                sent_bytes_per_node=max(node[index] for node in by_node) / repeats,
                relative_error=float(worst[index]),
            )
            for index, (cell, samples) in enumerate(zip(cells, times.view(-1, repeats).tolist(), strict=True))
        ]

    def _reduce(self, cell: Cell, *, check: bool) -> tuple[float, int, float]:
        """Reduces the buckets of one combination of size, algorithm and wire format (a cell) once.

        Returns this rank's seconds, the payload bytes that this rank sent, and the relative error (0 unless `check`).
        """
        key = (cell.algorithm, cell.wire)
        reducer, first = self._reducers[key], self._sizes_bytes.index(cell.num_bytes) * self._in_flight
        numbers = range(first, first + self._in_flight)
        for number in numbers:
            self._gradients.fill(self._buffers[key][number], bucket=self._buckets[number])
        sent_before = reducer.bytes_sent()
        self._wait_for_device()
        self._comm.barrier()
        started = time.perf_counter()
        run_to_end([reducer.reduce(number) for number in numbers])
        self._wait_for_device()
        seconds = time.perf_counter() - started
        reducer.end_step(applied=True, rescale=1.0)
        error = 0.0
        if check:
            error = self._gradients.relative_error(self._buffers[key][first], bucket=self._buckets[first])
        return seconds, reducer.bytes_sent() - sent_before, error

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _sent_by_node(self, mine: list[int]) -> list[list[int]]:
        """Returns `[node][cell]`: the bytes that a node's ranks have sent in each combination that was measured (cell).

        mine: the bytes that this rank has sent, by cell.
        """
        by_rank = all_gather_json(self._comm, mine)
        return [
            [sum(by_rank[rank][index] for rank in ranks) for index in range(len(mine))]
            for ranks in self._topology.ranks_by_node
        ]


# Measures all-reduces.


# (algorithm, wire) -> a reducer whose messages are separate from those of other reducers. Collective. Raises
# UsageError, the same on every rank, if the combination cannot run here.
MakeReducer = Callable[[str, str], BucketReducer]

# Memory of a reducer in multiples of its buckets: the buckets, and somewhat more than that for encoded data.
COPIES = 2.5
SHARE_OF_MEMORY = 0.5
SHARE_OF_SHARED = 0.8  # of /dev/shm, where the ranks of a node share their buckets
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceAsked:
    """The settings of the measurement. Raises UsageError for values out of range.

    sizes_bytes: sizes of the float32 gradients, ascending.
    in_flight: number of buckets that are reduced at the same time.
    """

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
                    f"--sizes: {num_bytes} bytes are no whole number of float32: give multiples of {ELEMENT_BYTES}"
                )
        if self.repeats < 1 or self.warmup < 0 or self.in_flight < 1:
            raise UsageError(
                f"{self.repeats} repeats, {self.warmup} warm-up rounds, {self.in_flight} in flight: give at least 1 "
                "repeat, 0 warm-up rounds and 1 in flight"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceRow:
    """A row of the table: one combination of size, algorithm and wire format. Bandwidths are in bytes/s.

    Attributes:
        algorithm: The requested algorithm, such as `auto`.
        runs: The algorithm that ran.
        wire: The requested wire format, such as `auto`.
        wire_runs: The wire format that ran.
        bound_bytes_per_node: The lower bound on the bytes that leave a node; None if no bound is known.
        bound_s: The lower bound on the time in seconds; None if no bound is known.
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
    rows: list[AllReduceRow]
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
) -> AllReduceMeasured:
    """Measures all combinations that can run on these ranks. Collective; returns the same value on every rank.

    A combination of size, algorithm and wire format is left out, with a note that says why, if it cannot run, or if
    hpctrain would run another combination instead. If the reducers do not all fit into memory, they are measured in
    groups, and a note says so.

    memory_bytes: the limit for the buckets of one rank. None: half of a host's free memory, but at most 80% of the free
    space in /dev/shm, divided by the number of ranks on the host; of all hosts, the smallest result is used.

    Raises UsageError if no combination can run.
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
    rows: list[AllReduceRow] = []
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
            row_of_cell(
                found, reducers[found.cell.algorithm, found.cell.wire], topology=topology, asked=asked,
                link_bytes_per_s=link_bytes_per_s,
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
    """Divides the pairs (algorithm, wire format) into groups of about equal size, and yields the groups.

    There are as few groups as memory allows. Each group has at least one pair.
    """
    at_once = max(1, int(budget_bytes // max(1, bytes_each)))
    num_groups = -(-len(pairs) // at_once)
    for number in range(num_groups):
        begin, end = (len(pairs) * n // num_groups for n in (number, number + 1))
        yield list(pairs[begin:end])


def _memory_for_buckets(comm: Collective) -> float:
    """Returns how many bytes the buckets of one rank may use: the smallest limit of all hosts. Collective."""
    free = SHARE_OF_MEMORY * psutil.virtual_memory().available
    if _SHARED_MEMORY.is_dir():
        free = min(free, SHARE_OF_SHARED * shutil.disk_usage(_SHARED_MEMORY).free)
    found = all_gather_json(comm, [socket.gethostname(), free])
    ranks_on = Counter(host for host, _ in found)
    return min(available / ranks_on[host] for host, available in found)


def _make(
    pairs: Sequence[tuple[str, str]], make: MakeReducer, *, left_out: dict[str, list[tuple[str, str]]]
) -> dict[tuple[str, str], BucketReducer]:
    """Creates the reducers of those `pairs` (algorithm, wire format) that can run on these ranks, and returns them.

    make: function that creates one reducer.
    left_out: the other pairs are added to it, by the reason why they cannot run.
    """
    reducers: dict[tuple[str, str], BucketReducer] = {}
    for algorithm, wire in pairs:
        try:
            reducers[algorithm, wire] = make(algorithm, wire)
        except UsageError as error:
            left_out.setdefault(str(error), []).append((algorithm, wire))
    return reducers


def notes_of(left_out: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """Returns one line per reason for which pairs of algorithm and wire format were not measured.

    An example is `not measured: ring, direct (fp32, fp16): ...`.
    """
    lines = []
    for reason, pairs in left_out.items():
        by_wires: dict[str, list[str]] = {}
        for algorithm in dict.fromkeys(algorithm for algorithm, _ in pairs):
            wires = ", ".join(wire for name, wire in pairs if name == algorithm)
            by_wires.setdefault(wires, []).append(algorithm)
        names = "; ".join(f"{', '.join(algorithms)} ({wires})" for wires, algorithms in by_wires.items())
        lines.append(f"not measured: {names}: {reason}")
    return lines


def row_of_cell(
    measured: CellResult,
    reducer: BucketReducer,
    *,
    topology: Topology,
    asked: AllReduceAsked,
    link_bytes_per_s: float | None,
) -> AllReduceRow:
    """Returns the row of one cell: of one combination of size, algorithm and wire format.

    `num_bytes` is the size of one bucket. With several buckets in flight, the time, the bandwidths and the bytes per
    node are those of all these buckets together.
    """
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
    return AllReduceRow(
        algorithm=cell.algorithm,
        runs=reducer.algorithm,
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
