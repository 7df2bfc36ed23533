"""Times the cells of the all-reduce table. A cell is a combination of size, algorithm and wire format."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import final

import torch

from hpctrain.comm import Collective, ReduceOp, all_gather_json
from hpctrain.reduce import ELEMENT_BYTES, Bucket, BucketReducer, Slot, run_to_end
from hpctrain.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination to measure. num_bytes: size of the float32 gradients."""

    algorithm: str
    wire: str
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return self.num_bytes // ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """Result of a cell. The same on every rank.

    samples_s: for each repeat, the time of the slowest rank. sent_bytes_per_node: payload bytes per reduction of the
    node that sent most. relative_error: largest difference from the float64 sum, divided by the largest absolute value
    of that sum, on the worst rank, in the last reduction (including the error feedback of earlier ones).
    """

    cell: Cell
    samples_s: tuple[float, ...]
    sent_bytes_per_node: float
    relative_error: float


def bucket_of(num_elements: int, *, number: int = 0, position: int = 0) -> Bucket:
    """Returns a bucket of exactly `num_elements` float32: the largest square matrix, the remainder, and their flags.

    It has a matrix because low-rank wires send only matrices as factors; for other wires it makes no difference.
    There is no padding before the flags: 4 KB in the table are 4 KB.
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
    """`in_flight` buckets of each size, one size after another."""
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
    """Input of each rank: one random vector, the same everywhere, times the rank's power of two.

    So every rank can compute the expected sum.
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
        """Largest difference of the sum in `memory` from the exact one, divided by the latter's largest value."""
        expected = self._base[: bucket.num_gradients].double() * self._sum_of_factors
        if not expected.numel():
            return 0.0
        found = memory[: bucket.num_gradients].cpu().double()
        return float((found - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


@final
class CellTimer:
    """Times the cells of several reducers that exist at the same time. Its methods are collective over `comm`.

    reducers: by (algorithm, wire), in the same order on every rank; each has a bucket of every size.
    progress: called with the share done, 0 to 1, after each reduction.
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
        """Passes every reducer its buckets. Not done in the constructor, which does not communicate."""
        for key, reducer in self._reducers.items():
            self._buffers[key] = reducer.plan(self._buckets, device=self._device)

    def measure(self, *, repeats: int, warmup: int) -> list[CellResult]:
        """Times every cell `warmup + repeats` times, in shuffled order each round; warm-up rounds are not counted.

        The shuffling spreads drift (other load on the machine, clock frequency) evenly over the cells.
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
        """Reduces once. Returns seconds on this rank, payload bytes that it sent, and the error (0 unless `check`)."""
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
        reducer.settle(applied=True, rescale=1.0)
        error = 0.0
        if check:
            error = self._gradients.relative_error(self._buffers[key][first], bucket=self._buckets[first])
        return seconds, reducer.bytes_sent() - sent_before, error

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _sent_by_node(self, mine: list[int]) -> list[list[int]]:
        """Bytes sent by node and cell: `[node][cell]`, summed over the node's ranks."""
        by_rank = all_gather_json(self._comm, mine)
        return [
            [sum(by_rank[rank][index] for rank in ranks) for index in range(len(mine))]
            for ranks in self._topology.ranks_by_node
        ]
