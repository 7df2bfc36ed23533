"""The program of each rank: `python -m benchmarks.reduction.ranks CASE SETTINGS.json RESULT.json`."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.reduction import steps
from benchmarks.reduction.models import WORKLOADS
from benchmarks.reduction.ours import available, name_of, our_family, our_method
from benchmarks.reduction.peers import Family, Method, gloo_family, horovod_family, mpi_family, start_gloo
from benchmarks.reduction.stream import ring_shift
from benchmarks.reduction.sweep import Sweep, run_sweep
from benchmarks.reduction.timing import Ranks, measure
from benchmarks.starting import this_rank
from hpctrain.run import Session, init

Settings = dict[str, Any]


def buffers(session: Session, ranks: Ranks, settings: Settings) -> dict[str, Any]:
    """Figure 2: times hpctrain, the peers and the plain MPI stream for one number of elements. settings: `families`
    lists those to time."""
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
    method = Method(name="stream", bits=0, fill=lambda values: None, reduce=shift, result=None)
    # Twice per round, since all records compare with it.
    return Family(name="stream", methods=lambda numel: [method, method])


def counted_bytes(session: Session, ranks: Ranks, settings: Settings) -> dict[str, Any]:
    """Figure 1: counts the bytes that leave each node in one reduction, by choice, and in a pause of the same
    length."""
    numel = settings["numel"]
    pause = Method(
        name="pause", bits=0, fill=lambda values: None, result=None,
        reduce=lambda: time.sleep(settings["pause_s"]),
    )  # fmt: skip
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


def training_steps(session: Session, ranks: Ranks, settings: Settings) -> dict[str, Any]:
    """Figure 3: times training steps with each method of reducing, and without communication, by workload."""
    start_gloo(ranks.comm)
    found = {}
    for name in settings["workloads"]:
        workload = WORKLOADS[name]
        batches = workload.batches(torch.Generator().manual_seed(settings["seed"] + session.rank))
        pairs = steps.make_pairs(
            ranks.comm, session, workload=workload, seed=settings["seed"], methods=settings["methods"]
        )
        steppers = [pair.stepper for pair in pairs]
        before = steps.flat(steppers[0].model)
        found[name] = steps.time_steps(
            ranks.comm, pairs, batches=batches, num_rounds=settings["num_rounds"],
            block=settings["block"], seed=settings["seed"],
        )  # fmt: skip
        steps.check(ranks.comm, steppers, start=before)
        for stepper in steppers:
            stepper.close()
    return found


def sweep(session: Session, ranks: Ranks, settings: Settings) -> dict[str, Any]:
    """Figure 4: times `auto` and the fixed choices, size by size."""
    asked = Sweep(
        choices=available(session, settings["choices"]),
        auto=(settings["auto"][0], settings["auto"][1]),
        numels=settings["numels"],
        num_rounds=settings["num_rounds"],
        budget_s=settings["budget_s"],
        seed=settings["seed"],
        calibration=Path(settings["directory"], "calibration.json"),
    )
    return run_sweep(ranks, session, asked)


def nothing(session: Session, ranks: Ranks, settings: Settings) -> None:
    """Does nothing; for a test of how ranks are started."""


CASES: dict[str, Callable[[Session, Ranks, Settings], Any]] = {
    "nothing": nothing,
    "buffers": buffers,
    "counted_bytes": counted_bytes,
    "training_steps": training_steps,
    "sweep": sweep,
}


def main(case: str, settings_path: str, result_path: str) -> None:
    settings = json.loads(Path(settings_path).read_text())
    faulthandler.dump_traceback_later(0.95 * settings["timeout_s"], exit=False)
    # Not the backend horovod: its thread would communicate while other methods are timed.
    session = init(backend="mpi", device="cpu", threads_per_rank=1, timeout_s=settings["timeout_s"])
    from mpi4py import MPI

    try:
        several = session.topology.num_nodes > 1
        started = MPI.COMM_WORLD.gather(this_rank(), root=0)
        firsts = [node[0] for node in session.topology.groups("local")] if several else []
        result = CASES[case](session, Ranks(comm=MPI.COMM_WORLD, firsts=firsts), settings)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        session.world.abort(1)
    if session.rank == 0:
        Path(result_path).write_text(json.dumps({"value": result, "ranks": started}))
    session.world.barrier()
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
