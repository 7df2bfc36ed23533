"""Times all methods once per round, in another random order each round."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reduction.peers import Family, Method
from benchmarks.reduction.stream import wait_asleep
from tests.cluster.plan import bytes_sent

# Largest accepted error of 8-bit sums of values near 1, with a margin; a wrong reduction has a far larger error.
TOLERANCE = 0.03


@dataclass(kw_only=True)
class Samples:
    """Measurements of one method, one entry per repetition: seconds of the slowest rank, bytes that left each node."""

    bits: int
    seconds: list[float] = field(default_factory=list)
    node_bytes: list[list[int]] = field(default_factory=list)  # (repetitions, nodes)


class WrongSum(RuntimeError):
    """A method's result is not the sum of its inputs, so its time is not valid."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """All ranks, as the measurement uses them. firsts: the first rank of each node; () on one node.

    With several nodes these ranks read the byte counters of their node's link.
    """

    comm: Any
    firsts: Sequence[int]

    @property
    def num_ranks(self) -> int:
        return int(self.comm.Get_size())

    def values(self, numel: int) -> torch.Tensor:
        """Returns this rank's input, shape (numel,), float32."""
        return torch.full((numel,), 1.0 + 0.01 * self.comm.Get_rank())

    def slowest_s(self, method: Method, *, repeats: int = 1) -> float:
        """Returns the seconds of one call on the slowest rank, the mean of `repeats` calls. Collective."""
        from mpi4py import MPI

        self.comm.Barrier()
        started = time.perf_counter()
        for _ in range(repeats):
            method.reduce()
        mine = np.array([(time.perf_counter() - started) / repeats])
        longest = np.empty(1)
        self.comm.Allreduce(mine, longest, op=MPI.MAX)
        return float(longest[0])

    def node_bytes(self) -> list[int]:
        """Returns the bytes that have left each node by its link so far. Collective; sends a few kB itself."""
        if not self.firsts:
            return []
        wait_asleep(self.comm)
        reads = self.comm.Get_rank() in self.firsts
        counted = self.comm.allgather(bytes_sent(Path("/proc/self/net/dev").read_text()) if reads else 0)
        return [counted[rank] for rank in self.firsts]

    def counted(self, method: Method) -> tuple[float, list[int]]:
        """Returns the seconds of one call, and the bytes that left each node during it. Collective."""
        before = self.node_bytes()
        seconds = self.slowest_s(method)
        return seconds, [now - then for now, then in zip(self.node_bytes(), before, strict=True)]

    def check(self, method: Method, *, numel: int) -> None:
        """Raises WrongSum unless the method's result is the sum (or mean) of the `values` of all ranks. Collective."""
        if method.result is None or numel == 0:
            return
        expected = 1 + 0.01 * (self.num_ranks - 1) / 2
        if not method.averages:
            expected *= self.num_ranks
        result = method.result()
        ends = torch.stack([result.min(), result.max()])
        if result.numel() != numel or not bool(((ends / expected - 1).abs() < TOLERANCE).all()):
            raise WrongSum(
                f"{method.name}, {numel} elements on {self.num_ranks} ranks: {ends.tolist()}, not {expected}"
            )


def measure(
    ranks: Ranks, families: Sequence[Family], *, numel: int, num_rounds: int, seed: int
) -> dict[str, Samples]:
    """Times each method once per round, one family after another. Collective; returns the same value on every rank."""
    order = random.Random(seed)
    values = ranks.values(numel)
    methods = {family.name: list(family.methods(numel)) for family in families}
    found = {method.name: Samples(bits=method.bits) for made in methods.values() for method in made}
    for round_number in range(num_rounds):
        for family in order.sample(list(families), len(families)):
            family.begin()
            for method in order.sample(methods[family.name], len(methods[family.name])):
                samples = found[method.name]
                if round_number == 0 or family.forgets:
                    method.fill(values)
                    method.reduce()
                    ranks.check(method, numel=numel)
                method.fill(values)
                seconds, node_bytes = ranks.counted(method)
                samples.seconds.append(seconds)
                samples.node_bytes.append(node_bytes)
            family.end()
    for made in methods.values():
        for method in made:
            method.close()
    return found
