"""What each rank runs: `python -m benchmarks.reduction.ranks CASE SETTINGS.json RESULT.json`."""

from __future__ import annotations

import faulthandler
import json
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.reduction.ours import our_family
from benchmarks.reduction.peers import Family, Method, gloo_family, horovod_family, mpi_family, start_gloo
from benchmarks.reduction.stream import ring_shift
from benchmarks.reduction.timing import measure
from hpctrain.comm import all_gather_json
from hpctrain.comm.mpi import MpiWorld
from hpctrain.topology import Topology

Settings = dict[str, Any]


def stream_family(comm: Any, topology: Topology, *, num_bytes: int) -> Family:
    shift = ring_shift(comm, topology=topology, num_bytes=num_bytes)
    method = Method(name="stream", bits=0, fill=lambda values: None, reduce=shift, result=None)
    return Family(name="stream", methods=lambda numel: [method])


def buffers(world: MpiWorld, topology: Topology, comm: Any, settings: Settings) -> dict[str, Any]:
    """Ours, the peers and the plain stream on one size."""
    numel = settings["numel"]
    families = [our_family(world, topology, choices=settings["choices"])]
    if settings["peers"]:
        start_gloo(comm)
        families += [mpi_family(comm), horovod_family(comm), gloo_family(comm.Get_size())]
    firsts = [ranks[0] for ranks in topology.groups("local")] if topology.num_nodes > 1 else []
    if firsts:
        families.append(stream_family(comm, topology, num_bytes=settings["stream_bytes"]))
    found = measure(
        comm, families, numel=numel, num_rounds=settings["num_rounds"], seed=settings["seed"], firsts=firsts
    )
    return {name: asdict(samples) for name, samples in found.items()}


CASES: dict[str, Callable[[MpiWorld, Topology, Any, Settings], Any]] = {"buffers": buffers}


def main(case: str, settings_path: str, result_path: str) -> None:
    settings = json.loads(Path(settings_path).read_text())
    faulthandler.dump_traceback_later(0.95 * settings["timeout_s"], exit=False)
    torch.set_num_threads(1)
    world = MpiWorld.open()
    from mpi4py import MPI

    try:
        topology = Topology.from_node_names(all_gather_json(world, platform.node()))
        result = CASES[case](world, topology, MPI.COMM_WORLD, settings)
        if world.rank == 0:
            Path(result_path).write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        world.abort(1)
    world.barrier()
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
