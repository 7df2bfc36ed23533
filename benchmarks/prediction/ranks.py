"""What the ranks do for the predictions: all-reduces and training steps."""

from __future__ import annotations

import time
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.ranks import Case, Settings
from benchmarks.reduction.steps import WORKLOADS
from benchmarks.reduction.suite import PER_STEP
from hpctrain.bench import AllReduceAsked, ReducersHere, all_reduce_document, all_reduce_on
from hpctrain.bench.all_reduce.run import LinkRate
from hpctrain.comm import ReduceOp
from hpctrain.run import Session

THREADS = 1
WARMUP_STEPS = 2
LEAST_STEPS = 3
MOVED_BYTES, MOVES = 8 << 20, 20
MOST_STEPS = 60


def measure(session: Session, settings: Settings) -> dict[str, Any]:
    """Times all-reduces, if settings name `sizes`, and training steps of each workload with each algorithm."""
    found: dict[str, Any] = {"steps": {}, "reductions": None, "moving": None}
    if settings["sizes"] and session.world_size > 1:
        asked = AllReduceAsked(
            sizes_bytes=tuple(settings["sizes"]), algorithms=tuple(settings["reductions"]), wires=("fp32",),
            repeats=settings["repeats"], warmup=1,
        )  # fmt: skip
        rate = settings["bytes_per_s"]
        link = None if rate is None else LinkRate(bytes_per_s=rate, source="given")
        reducers = ReducersHere(session, gradient_bytes=sum(asked.sizes_bytes), nccl=None)
        measured = all_reduce_on(session, asked, reducers=reducers, link=link, progress=lambda share: None)
        found["reductions"] = all_reduce_document(
            session, asked, measured, reducers=reducers, link=link, commit=None
        )
    if settings["moving"]:
        found["moving"] = _processor_time_of_moving(session)
    for name in settings["workloads"]:
        for algorithm in settings["algorithms"]:
            found["steps"][f"{name} {algorithm}"] = _steps(
                session, name, algorithm=algorithm, cell_s=settings["cell_s"]
            )
    return found


def _processor_time_of_moving(session: Session) -> dict[str, float]:
    """Measures what the cores of this machine take for bytes that the nodes send to each other: `processor_s` for
    `bytes`, of all nodes together, in `seconds`. Most of it is the kernel's and counts for no process, so nothing else
    may run.

    Every rank sends to the next one: what a node sends and what it receives is not of the same pair of ranks.
    """
    from mpi4py import MPI

    comm, topology = MPI.COMM_WORLD, session.topology
    sent, received = np.ones(MOVED_BYTES, np.uint8), np.empty(MOVED_BYTES, np.uint8)
    after, before = (session.rank + 1) % session.world_size, (session.rank - 1) % session.world_size
    busy_s = began = 0.0
    for number in range(1 + MOVES):
        comm.Barrier()
        if number == 1:  # the first one opens the connections
            busy_s, began = _busy_s(), time.perf_counter()
        comm.Sendrecv(sent, after, 0, received, before, 0)
    comm.Barrier()
    seconds, busy_s = time.perf_counter() - began, _busy_s() - busy_s
    return {
        "seconds": seconds,
        "processor_s": busy_s,
        "bytes": float(topology.num_nodes * MOVES * MOVED_BYTES),
    }


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _steps(session: Session, name: str, *, algorithm: str, cell_s: float) -> dict[str, Any]:
    """Times steps for `cell_s` seconds, at least LEAST_STEPS. Returns `step_s`, the slowest rank's time of each
    step, and other times of rank 0 as means over the steps."""
    torch.manual_seed(1)
    workload = WORKLOADS[name]
    model = workload.make()
    batches = workload.batches(torch.Generator().manual_seed(session.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    updater = session.distributed_optimizer(model, optimizer, algorithm=algorithm, wire="fp32")
    steps, exposed, times = [], [], []
    began = time.perf_counter()
    number = 0
    while True:
        started = time.perf_counter()
        inputs, targets = batches[number % len(batches)]
        updater.backward(workload.loss(model(inputs), targets), weight=1 / session.world_size)
        outcome = updater.step()
        number += 1
        if number > WARMUP_STEPS:
            steps.append(time.perf_counter() - started)
            exposed.append(outcome.exposed_sync_s)
            times.append(outcome.times)
        else:
            began = time.perf_counter()
        # Whether to go on is rank 0's decision.
        more = len(steps) < LEAST_STEPS or (time.perf_counter() - began < cell_s and len(steps) < MOST_STEPS)
        if number >= WARMUP_STEPS + LEAST_STEPS:
            decision = torch.tensor([float(more)])
            session.world.broadcast(decision, root=0)
            more = bool(decision)
        if not more:
            break
    updater.close()
    slowest = torch.tensor(steps, dtype=torch.float64)
    session.world.all_reduce(slowest, op=ReduceOp.MAX)
    full = [one for one in times if one is not None]
    if not full:
        raise RuntimeError(f"{algorithm}: no step recorded when its buckets were complete")
    return {
        "step_s": slowest.tolist(),
        "rank_0_step_s": steps,
        "exposed_s": exposed,
        "backward_s": median(one.backward_s for one in full),
        "update_s": median(one.update_s for one in full),
        "ready_s": [fmean(values) for values in zip(*(one.ready_s for one in full), strict=True)],
        "bytes": list(full[0].bucket_bytes),
        "samples": PER_STEP[name],
    }


CASES: dict[str, Case] = {"measure": measure}
