"""What ranks do on the cluster: `python -m tests.cluster.rank_cases CASE ARGUMENT ...`, under srun or mpirun."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path


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


def reduce(num_elems: str) -> None:
    """One two-level sum of so many float32 elements."""
    import torch

    from hpctrain.comm import all_gather_json, make_two_level
    from hpctrain.comm.mpi import MpiWorld
    from hpctrain.topology import Topology

    world = MpiWorld.open()
    topology = Topology.from_node_names(all_gather_json(world, platform.node()))
    buffer = torch.ones(int(num_elems))
    make_two_level(world, topology).all_reduce(buffer)
    if not bool((buffer == world.num_ranks).all()):
        world.abort(1)
    world.close()


if __name__ == "__main__":
    {"who": who, "reduce": reduce}[sys.argv[1]](*sys.argv[2:])
