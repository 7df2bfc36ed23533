"""What the ranks do for the reductions that are timed and counted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ranks import Case, Settings
from benchmarks.reduction import steps
from benchmarks.reduction.methods import (
    Family,
    Method,
    available,
    gloo_family,
    horovod_family,
    mpi_family,
    name_of,
    our_family,
    our_method,
    start_gloo,
)
from hpctrain.run import Session
from hpctrain.topology import Topology
from tests.cluster.plan import bytes_sent

THREADS = 1
# Largest accepted error of 8-bit sums of values near 1, with a margin; a wrong reduction has a far larger error.
TOLERANCE = 0.03


@dataclass(kw_only=True)
class Samples:
    """Measurements of one method, one entry per repetition: seconds of the slowest rank, bytes that left each node."""

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

    @classmethod
    def of(cls, session: Session) -> Ranks:
        from mpi4py import MPI

        several = session.topology.num_nodes > 1
        firsts = [node[0] for node in session.topology.groups("local")] if several else []
        return cls(comm=MPI.COMM_WORLD, firsts=firsts)

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
    found = {method.name: Samples() for made in methods.values() for method in made}
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


# ---------------------------------------------------------------------- the links


# With 1, 2, 4 and 12 messages of 12.6 MB in total the rate was the same within the noise, which was least with 12.
NUM_MESSAGES = 12


def ring_shift(comm: Any, *, topology: Topology, num_bytes: int) -> Callable[[], None]:
    """Returns a function in which one rank of each node sends `num_bytes` to the next node and receives as many from
    the previous one. All messages are in flight at once; the other ranks sleep. Calling the function is collective.
    """
    from mpi4py import MPI

    firsts = [ranks[0] for ranks in topology.groups("local")]
    rank = comm.Get_rank()
    if rank not in firsts:
        return lambda: wait_asleep(comm)
    place = firsts.index(rank)
    to, source = firsts[(place + 1) % len(firsts)], firsts[place - 1]
    out = [np.ones(num_bytes // NUM_MESSAGES, dtype=np.uint8) for _ in range(NUM_MESSAGES)]
    into = [np.ones(num_bytes // NUM_MESSAGES, dtype=np.uint8) for _ in range(NUM_MESSAGES)]

    def shift() -> None:
        requests = [comm.Irecv(part, source=source, tag=7) for part in into]
        requests += [comm.Isend(part, dest=to, tag=7) for part in out]
        MPI.Request.Waitall(requests)
        wait_asleep(comm)

    return shift


def wait_asleep(comm: Any) -> None:
    """Waits for all ranks like a barrier, but sleeps meanwhile, so that working ranks have the cores. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)


# ---------------------------------------------------------------------- auto and the fixed choices, size by size


# A sample of a small bucket is the mean over as many calls as fit into this time.
SAMPLE_S = 0.06
MAX_REPEATS = 400
# After the first rounds only choices within this factor of the best are timed further. Below CARRIED_NUMEL elements all
# choices are timed again at the next size; from there on only the remaining ones, as times grow in proportion.
CONTENDER = 1.6
FIRST_ROUNDS = 2
CARRIED_NUMEL = 1 << 18


def sweep(session: Session, settings: Settings) -> dict[str, dict[str, Any]]:
    """Figure 4: times `auto` and the fixed choices, size by size. Returns for each number of elements: `times`, seconds
    by choice, and `runs`, what `auto` chose.

    settings: `choices`, `auto`; `numels`, ascending; `num_rounds`; `budget_s`, time for one size: no round begins
    later, except the first FIRST_ROUNDS + 1; `seed`. `auto` measures once, as in a run, and reads its file for each
    size.
    """
    ranks, order = Ranks.of(session), random.Random(settings["seed"])
    contenders = available(session, settings["choices"])
    found: dict[str, dict[str, Any]] = {}
    for numel in settings["numels"]:
        times, runs = _one_size(ranks, session, settings, numel=numel, choices=contenders, order=order)
        found[str(numel)] = {"times": times, "runs": runs}
        if numel >= CARRIED_NUMEL:
            near = _near_the_best(times, auto=name_of(*settings["auto"]))
            contenders = [choice for choice in contenders if name_of(*choice) in near]
    return found


def _one_size(
    ranks: Ranks, session: Session, settings: Settings, *, numel: int, choices: Sequence[tuple[str, str]],
    order: random.Random,
) -> tuple[dict[str, list[float]], str]:  # fmt: skip
    auto, calibration = name_of(*settings["auto"]), Path(settings["directory"], "calibration.json")
    methods = [
        our_method(session, numel=numel, algorithm=name, wire=wire, calibration=calibration)
        for name, wire in (settings["auto"], *choices)
    ]
    values, zeros = ranks.values(numel), torch.zeros(numel)
    repeats = {}
    for method in methods:
        method.fill(values)
        method.reduce()
        ranks.check(method, numel=numel)
        method.fill(zeros)  # repeated sums would overflow
        repeats[method.name] = max(1, min(MAX_REPEATS, int(SAMPLE_S / ranks.slowest_s(method))))
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    active, spent_s = methods, 0.0
    for round_number in range(settings["num_rounds"]):
        if round_number == FIRST_ROUNDS:
            near = _near_the_best(times, auto=auto)
            active = [method for method in methods if method.name in near]
        if round_number > FIRST_ROUNDS and spent_s > settings["budget_s"]:
            break
        for method in order.sample(active, len(active)):
            seconds = ranks.slowest_s(method, repeats=repeats[method.name])
            times[method.name].append(seconds)
            spent_s += seconds * repeats[method.name]
    for method in methods:
        method.close()
    return times, methods[0].runs


def _near_the_best(times: dict[str, list[float]], *, auto: str) -> set[str]:
    best = min(min(seconds) for name, seconds in times.items() if name != auto)
    return {name for name, seconds in times.items() if name == auto or min(seconds) <= CONTENDER * best}


# ---------------------------------------------------------------------- the cases


def buffers(session: Session, settings: Settings) -> dict[str, Any]:
    """Figure 2: times hpctrain, the peers and the plain MPI stream for one number of elements. settings: `families`
    lists those to time."""
    ranks = Ranks.of(session)
    start_gloo(ranks.comm)
    families = [
        our_family(session, choices=settings["choices"]),
        mpi_family(ranks.comm),
        horovod_family(ranks.comm),
        gloo_family(ranks.num_ranks),
    ]
    if ranks.firsts:
        families.append(_stream(session, ranks, num_bytes=settings["stream_bytes"]))
    families = [family for family in families if family.name in settings["families"]]
    found = measure(
        ranks, families, numel=settings["numel"], num_rounds=settings["num_rounds"], seed=settings["seed"]
    )
    return {name: asdict(samples) for name, samples in found.items()}


def _stream(session: Session, ranks: Ranks, *, num_bytes: int) -> Family:
    shift = ring_shift(ranks.comm, topology=session.topology, num_bytes=num_bytes)
    method = Method(name="stream", fill=lambda values: None, reduce=shift, result=None)
    # Twice per round, since all records compare with it.
    return Family(name="stream", methods=lambda numel: [method, method])


def counted_bytes(session: Session, settings: Settings) -> dict[str, Any]:
    """Figure 1: counts the bytes that leave each node in one reduction, by choice, and in a pause of the same
    length."""
    ranks, numel = Ranks.of(session), settings["numel"]
    pause_s = settings["pause_s"]
    pause = Method(name="pause", fill=lambda values: None, reduce=lambda: time.sleep(pause_s), result=None)
    seconds, idle = ranks.counted(pause)
    found = {"pause": {"seconds": seconds, "node_bytes": idle}}
    values = ranks.values(numel)
    for algorithm, wire in available(session, settings["choices"]):
        method = our_method(session, numel=numel, algorithm=algorithm, wire=wire)
        method.fill(values)
        seconds, node_bytes = ranks.counted(method)
        ranks.check(method, numel=numel)
        method.close()
        found[name_of(algorithm, wire)] = {"seconds": seconds, "node_bytes": node_bytes}
    return found


def training_steps(session: Session, settings: Settings) -> dict[str, Any]:
    """Figure 3: times training steps with each method of reducing, and without communication, by workload."""
    comm = Ranks.of(session).comm
    start_gloo(comm)
    found = {}
    for name in settings["workloads"]:
        workload = steps.WORKLOADS[name]
        batches = workload.batches(torch.Generator().manual_seed(settings["seed"] + session.rank))
        pairs = steps.make_pairs(
            comm, session, workload=workload, seed=settings["seed"], methods=settings["methods"]
        )
        steppers = [pair.stepper for pair in pairs]
        before = steps.flat(steppers[0].model)
        found[name] = steps.time_steps(
            comm, pairs, batches=batches, num_rounds=settings["num_rounds"],
            block=settings["block"], seed=settings["seed"],
        )  # fmt: skip
        steps.check(comm, steppers, start=before)
        for stepper in steppers:
            stepper.close()
    return found


def nothing(session: Session, settings: Settings) -> None:
    """Does nothing; for a test of how ranks are started."""


CASES: dict[str, Case] = {
    "nothing": nothing,
    "buffers": buffers,
    "counted_bytes": counted_bytes,
    "training_steps": training_steps,
    "sweep": sweep,
}
