"""Methods in turn: every round times each of them, in another order."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reduction.peers import Family, Method
from benchmarks.reduction.stream import wait_asleep
from tests.cluster.plan import bytes_sent

# What fp16 sums of eight values near 1 may be off by, with room; a wrong reduction is off by far more.
TOLERANCE = 0.02


@dataclass(kw_only=True)
class Samples:
    """Of one method: seconds of the slowest rank and bytes that left each node, one entry a repetition."""

    bits: int
    seconds: list[float] = field(default_factory=list)
    node_bytes: list[list[int]] = field(default_factory=list)  # (repetitions, nodes)


class WrongSum(RuntimeError):
    """A method did not sum what it was given: its time would mean nothing."""


def measure(
    comm: Any,
    families: Sequence[Family],
    *,
    numel: int,
    num_rounds: int,
    seed: int,
    warm_ups: int = 1,
    repeats: int = 1,
    firsts: Sequence[int] = (0,),
    skip: Iterable[str] = (),
    made: dict[str, list[Method]] | None = None,
) -> dict[str, Samples]:
    """Time each method once a round. Collective over `comm`; the same result on every rank.

    repeats: calls that make one sample, for small sizes. firsts: the first rank of each node, where the
    node's bytes are read; () where there is no network to count on.
    """
    order = random.Random(seed)
    values = torch.full((numel,), 1.0) + 0.01 * comm.Get_rank()
    methods = made if made is not None else {family.name: list(family.methods(numel)) for family in families}
    found: dict[str, Samples] = {}
    for _ in range(num_rounds):
        for family in order.sample(list(families), len(families)):
            family.begin()
            for method in order.sample(methods[family.name], len(methods[family.name])):
                if method.name in skip:
                    continue
                samples = found.setdefault(method.name, Samples(bits=method.bits))
                for _ in range(warm_ups):
                    method.fill(values)
                    method.reduce()
                check(comm, method, numel=numel) if not samples.seconds else None
                method.fill(values)
                before = node_bytes(comm, firsts)
                samples.seconds.append(slowest(comm, method, repeats=repeats))
                after = node_bytes(comm, firsts)
                samples.node_bytes.append([b - a for a, b in zip(before, after, strict=True)])
            family.end()
    return found


def slowest(comm: Any, method: Method, *, repeats: int) -> float:
    """Seconds of one call, on the rank where it took longest."""
    comm.Barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        method.reduce()
    mine = np.array([(time.perf_counter() - started) / repeats])
    longest = np.empty(1)
    from mpi4py import MPI

    comm.Allreduce(mine, longest, op=MPI.MAX)
    return float(longest[0])


def check(comm: Any, method: Method, *, numel: int) -> None:
    """Raises WrongSum unless the method has reduced what `fill` gave each rank."""
    if method.result is None or numel == 0:
        return
    num_ranks = comm.Get_size()
    expected = num_ranks + 0.01 * num_ranks * (num_ranks - 1) / 2
    if method.averages:
        expected /= num_ranks
    result = method.result()
    ends = torch.stack([result.min(), result.max()])
    if result.numel() < numel or not bool(((ends / expected - 1).abs() < TOLERANCE).all()):
        raise WrongSum(f"{method.name}, {numel} elements on {num_ranks} ranks: {ends.tolist()}, not {expected}")


def node_bytes(comm: Any, firsts: Sequence[int]) -> list[int]:
    """Bytes that have left each node by its link so far. Collective. It sends some itself: see `idle_bytes`."""
    wait_asleep(comm)
    mine = bytes_sent(Path("/proc/self/net/dev").read_text()) if comm.Get_rank() in firsts else 0
    counted = comm.allgather(mine)
    return [counted[rank] for rank in firsts]
