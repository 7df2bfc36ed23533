"""What each rank of the tests of loading runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint import Replicated, State, load, load_weights, open_checkpoint, save
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors

NUM_ELEMS = 6 << 20  # 24 MiB in float32


def read_bytes() -> int:
    """What this process has read from files so far, from wherever they were."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def share_and_load(world: Any, directory: str) -> dict[str, Any]:
    """Save as a file and as a folder; load with the ranks of two made-up nodes sharing; weights alone.

    share, alone: the part of the large tensor's bytes that this rank read, with sharing and without.
    """
    half = (world.num_ranks + 1) // 2
    node_of_rank = [rank // half for rank in range(world.num_ranks)]
    found: dict[str, Any] = {}
    for files in (1, 3):
        place = Path(directory) / f"{world.backend}-{files}"
        path = save(
            state_of(world.rank, world.num_ranks), directory=place, step=1, comm=world, files=files
        ).path
        regions = {"grid": ((2, 1), (9, 3))} if world.rank == 1 else None
        _, tensors = load(path, comm=world, regions=regions, sharing="node", node_of_rank=node_of_rank)
        for name, whole in whole_tensors().items():
            expected = whole[2:11, 1:4] if regions is not None and name == "grid" else whole
            assert same_bits(tensors[name], expected), (files, name)
    large = torch.arange(NUM_ELEMS, dtype=torch.float32)
    model = torch.nn.Linear(30, 20)
    items = [Replicated(name="large", tensor=large)]
    items += [
        Replicated(name=f"model/{n}", tensor=torch.full_like(t, 3)) for n, t in model.state_dict().items()
    ]
    path = save(
        State(items=items), directory=Path(directory) / f"{world.backend}-large", step=1, comm=world
    ).path
    for sharing in ("node", "none"):
        open_checkpoint(path, comm=world)
        before = read_bytes()
        _, tensors = load(path, comm=world, sharing=sharing, node_of_rank=node_of_rank)
        found[sharing] = (read_bytes() - before) / (4 * NUM_ELEMS)
        assert torch.equal(tensors["large"], large)
    report = load_weights(model, path, comm=world)
    assert report.fits
    assert bool((model.weight == 3).all())
    return found
