"""What each rank of the tests of two tiers runs."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint import identify_run, load_newest_good
from hpctrain.checkpoint.saving.background import HostBuffers
from hpctrain.checkpoint.tiers.recover import recover
from hpctrain.checkpoint.tiers.two_tier_save import Tiers
from hpctrain.topology import Topology
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors


def open_tiers(world: Any, directory: str, *, ranks_per_node: int) -> Tiers:
    """Nodes are emulated; each has a folder of its own in `directory/local`. The run is the one of `directory/run`."""
    names = [f"host/{rank // ranks_per_node}" for rank in range(world.num_ranks)]
    run, shared = Path(directory) / "run", Path(directory) / "run" / "checkpoints"
    shared.mkdir(parents=True, exist_ok=True)
    world.barrier()
    return Tiers.open(
        local=Path(directory) / "local",
        shared=shared,
        run=identify_run(run, checkpoints=shared, comm=world).id,
        topology=Topology.from_node_names(names, emulated=True),
        comm=world,
    )


def save_twice_and_die(world: Any, directory: str) -> None:
    """Step 10 is saved beside collective work of the training, and committed. Step 20 has reached all nodes'
    storage and their partners when every rank is killed."""
    tiers = open_tiers(world, directory, ranks_per_node=2)
    buffers, executor = HostBuffers(), ThreadPoolExecutor(1)
    for step in (10, 20):
        state = state_of(world.rank, world.num_ranks)
        saving = tiers.begin_save(state, step=step, comm=world, buffers=buffers, executor=executor)
        result = None
        while result is None:
            # A step of training: communication in this thread only, and a vote whether all are ready.
            ready = torch.tensor([int(saving.ready())], dtype=torch.int32)
            world.all_reduce(ready)
            if int(ready) < world.num_ranks:
                time.sleep(0.01)
                continue
            if step == 20 and saving._phase is not None and saving._phase.name.startswith("draining"):
                break
            result = saving.advance()
    (Path(directory) / f"died-{world.rank}").touch()
    world.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def recover_and_load(world: Any, directory: str) -> dict[str, Any]:
    """step: of the checkpoint that the ordinary load finds. recovered: what was brought back before.

    First with the run directory removed, and another one in its place: none of it is that run's.
    """
    run, kept = Path(directory) / "run", Path(directory) / "kept"
    if world.rank == 0:
        run.rename(kept)
    world.barrier()
    tiers = open_tiers(world, directory, ranks_per_node=1)
    found = recover(tiers, comm=world)
    assert (found.path, found.step, found.notes) == (None, None, ())
    assert load_newest_good(tiers.shared, comm=world) is None
    tiers.close()
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(run)
        kept.rename(run)
    world.barrier()
    tiers = open_tiers(world, directory, ranks_per_node=1)
    found = recover(tiers, comm=world)
    restored = load_newest_good(tiers.shared, comm=world)
    assert restored is not None
    for name, tensor in whole_tensors().items():
        assert same_bits(restored.tensors[name], tensor), name
    tiers.close()
    return {"step": restored.checkpoint.step, "recovered": found.step, "notes": list(found.notes)}
