"""What ranks do on the cluster: `python -m tests.cluster.rank_cases CASE ARGUMENT ...`, under srun or mpirun."""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def who(directory: str) -> None:
    """Write down which rank this is, by our reading of the launcher and by MPI's."""
    from mpi4py import MPI

    from hpctrain.launch import identify

    identity = identify(dict(os.environ), platform.node())
    world = MPI.COMM_WORLD
    found = {
        "launcher": identity.launcher,
        "rank": identity.rank,
        "mpi_rank": world.Get_rank(),
        "num_ranks": identity.num_ranks,
        "mpi_num_ranks": world.Get_size(),
        "host": platform.node(),
        "sum": world.allreduce(world.Get_rank()),
    }
    Path(directory, f"rank-{world.Get_rank()}.json").write_text(json.dumps(found))


def alone() -> None:
    """Print why this process is not the only rank, if it knows; and stay until the others have looked too."""
    from hpctrain.launch import read_surroundings, why_not_alone

    print(why_not_alone(os.environ, read_surroundings(os.environ)), flush=True)
    time.sleep(3)


def reduce(num_elems: str) -> None:
    """One two-level sum of so many float32 elements."""
    import torch

    from hpctrain.comm import all_gather_json, make_two_level
    from hpctrain.comm.backends.mpi_world import MpiWorld
    from hpctrain.topology import Topology

    world = MpiWorld.open()
    topology = Topology.from_node_names(all_gather_json(world, platform.node()))
    buffer = torch.ones(int(num_elems))
    make_two_level(world, topology).all_reduce(buffer)
    if not bool((buffer == world.num_ranks).all()):
        world.abort(1)
    world.close()


def reduce_for_ever(backend: str, by: str, algorithm: str, timeout_s: str, directory: str) -> None:
    """Sums without end, until the deadline ends it. Rank 0 makes the file `sums` once all are under way.

    by: `updater`, the steps of one with this algorithm, or `backend`, whose own operations sum.
    """
    import torch

    from hpctrain.comm import make_two_level
    from hpctrain.run import init

    session = init(backend=backend, timeout_s=float(timeout_s))
    session.world.publish_in(Path(directory, "watch"))
    session.world.barrier()
    if by == "updater":  # as training reduces
        model = torch.nn.Linear(1000, 500, bias=False)
        optimizer: Any = _Still(model.parameters())
        updater = session.distributed_optimizer(model, optimizer, algorithm=algorithm)

        def reduce() -> None:
            updater.backward(model(torch.ones(1, 1000)).mean(), weight=1 / session.world_size)
            updater.step()
    else:
        sums = session.world.open_reduction_world()
        by_level = sums if algorithm == "flat" else make_two_level(sums, session.topology)
        reduce = functools.partial(by_level.all_reduce, torch.zeros(500_000))
    start_s = time.monotonic()
    for number in itertools.count():
        session.world.step = number
        reduce()
        if number >= 20 and session.rank == 0 and time.monotonic() > start_s + 3:  # doors are learned by then
            Path(directory, "sums").touch()


def time_left(directory: str) -> None:
    """Write down which job Slurm is asked about here, and when it ends; and what `hpctrain supervise` finds."""
    from hpctrain.errors import LaunchError
    from hpctrain.resilience.wall_clock import ask_job_end, job_to_ask_about
    from hpctrain.supervise import find_allocation

    job = job_to_ask_about(os.environ)
    assert job is not None
    answer = ask_job_end(job)
    found = {"job": job, "left_s": answer.end_s and answer.end_s - time.time(), "problem": answer.problem}
    try:
        there = find_allocation(os.environ)
        found["allocation"] = [there.job, *there.nodes]
        found["allocation_left_s"] = there.time_limit and there.time_limit - time.time()
    except LaunchError as error:
        found["refused"] = str(error)
    written = Path(directory, f".{job}")
    written.write_text(json.dumps(found))
    written.rename(Path(directory, f"{job}.json"))


def leave(mostly: str, code_of_rank_1: str) -> None:
    """Leave with these exit codes, at about the same time."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    MPI.Finalize()
    time.sleep(random.uniform(0, 0.3))
    sys.exit(int(code_of_rank_1) if rank == 1 else int(mostly))


def fill_memory() -> None:
    """Rank 1 takes memory until the kernel kills it; the others wait for it."""
    from mpi4py import MPI

    taken = []
    MPI.COMM_WORLD.Barrier()
    while MPI.COMM_WORLD.Get_rank() == 1:
        taken.append(bytearray(b"x") * (32 << 20))
    MPI.COMM_WORLD.Barrier()


class _Still:
    """What an updater needs of an optimizer; one of torch's takes seconds to load on so many ranks."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None: ...

    def zero_grad(self, *, set_to_none: bool) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None  # or the sums would grow until they are infinite


if __name__ == "__main__":
    cases = {
        "who": who,
        "alone": alone,
        "reduce": reduce,
        "reduce_for_ever": reduce_for_ever,
        "time_left": time_left,
        "leave": leave,
        "fill_memory": fill_memory,
    }
    cases[sys.argv[1]](*sys.argv[2:])
