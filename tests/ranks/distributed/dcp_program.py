"""FSDP2 over hpctrain's group, its checkpoint imported, loaded by our reader, exported, and loaded by DCP again.

    python -m tests.ranks.distributed.dcp_program save|load DIRECTORY

`save` trains, saves by DCP, imports that, and writes whole tensors as the reference; `load`, on any number of ranks,
compares all with the reference bit by bit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hpctrain
from hpctrain.checkpoint import export_dcp, import_dcp, load
from hpctrain.storage import part_of

STEP = 5


def sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of FSDP2 whose parameters do not divide evenly, one of them with fewer rows than there are ranks."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.BatchNorm1d(13), torch.nn.Linear(13, 1)).to(
        torch.bfloat16
    )
    model[2].double()
    for layer in model:
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of the state, gathered, by the names that they have in our checkpoint. Collective."""
    found = {f"model/{name}": whole(value) for name, value in state["model"].items()}
    for parameter, entries in state["optim"]["state"].items():
        found |= {f"optimizer/{parameter}::{key}": whole(value) for key, value in entries.items()}
    return found


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def save(session: hpctrain.Session, directory: Path) -> None:
    model, optimizer = sharded()
    for step in range(STEP):
        torch.manual_seed(100 * step + session.rank)
        hidden = model[1](model[0](torch.randn(6, 7, dtype=torch.bfloat16)))
        model[2](hidden.double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for buffer in model.buffers():  # each rank has its own; DCP saves one rank's
        dist.broadcast(buffer, 0)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=directory / "dcp")
    # On a group of its own, while the others go on.
    saving = dcp.async_save(state, checkpoint_id=directory / "async", process_group=dist.new_group())
    for _ in range(50):
        dist.all_reduce(torch.ones(1000))
    saving.result()
    reference = whole_tensors(state)
    assert any(tensor.abs().max() > 0 for name, tensor in reference.items() if name.endswith("exp_avg"))
    if session.rank == 0:
        torch.save(reference, directory / "reference.pt")
    import_dcp(directory / "dcp", directory / "ours", comm=session.world, step=STEP)


def load_again(session: hpctrain.Session, directory: Path) -> None:
    expected = torch.load(directory / "reference.pt", weights_only=True)
    checkpoint = directory / "ours" / f"step-{STEP:08}.h5"
    check(load(checkpoint, comm=session.world)[1], expected)
    first, stop = part_of(13, part=session.rank, num_parts=session.world_size)
    regions = {"model/0.weight": ((first, 0), (stop - first, 7))}
    part = load(checkpoint, comm=session.world, regions=regions)[1]["model/0.weight"]
    assert torch.equal(part, expected["model/0.weight"][first:stop])

    export_dcp(checkpoint, directory / "back", comm=session.world)
    model, optimizer = sharded()
    state = state_of(model, optimizer)
    for saved in ("async", "back"):
        for value in state["model"].values():
            value.zero_()
        dcp.load(state, checkpoint_id=directory / saved)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        check(whole_tensors(state_of(model, optimizer)), expected)
    assert optimizer.param_groups[0]["lr"] == 1e-2


def main(what: str, directory: Path) -> None:
    session = hpctrain.init_process_group(timeout_s=300)
    {"save": save, "load": load_again}[what](session, directory)
    rank = session.rank
    dist.destroy_process_group()
    print(f"rank {rank} agrees", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
