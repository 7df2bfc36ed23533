"""Trains a small model in several ways over torch.distributed, and compares with one process, in float64."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hpctrain

STEPS, SAMPLES, WIDTH = 20, 24, 16
RELATIVE = 1e-10


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, 48), torch.nn.Tanh(), torch.nn.Linear(48, WIDTH))
        for _ in range(4)
    ]
    return torch.nn.Sequential(*blocks).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64),
    )


def train(
    model: torch.nn.Module, *, part: int = 0, parts: int = 1, optimizer: torch.optim.Optimizer | None = None
) -> tuple[list[float], torch.optim.Optimizer]:
    """Returns the losses of this part of each batch."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = (tensor.chunk(parts)[part] for tensor in batch(step))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def check(model: torch.nn.Module, expected: dict[str, torch.Tensor], what: str) -> None:
    worst = 0.0
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        wanted = expected[name.removeprefix("module.")]
        worst = max(worst, float((whole - wanted).abs().max() / wanted.abs().max()))
    if dist.get_rank() == 0:
        print(f"{what}: {worst:.1e}", flush=True)
    assert worst < RELATIVE, what


def main(directory: Path) -> None:
    session = hpctrain.init_process_group(timeout_s=300)
    rank, size = session.rank, session.world_size
    alone = make_model()
    train(alone)
    expected = alone.state_dict()

    model: torch.nn.Module = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    train(model, part=rank, parts=size)
    check(model, expected, "DDP")

    # Its callbacks ask for operations. With as many columns as the gradients have nothing is lost.
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    state = PowerSGDState(
        None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    model.register_comm_hook(state, powerSGD_hook)
    train(model, part=rank, parts=size)
    check(model, expected, "DDP with PowerSGD")

    sharded = make_model()
    for block in sharded:
        fully_shard(block)
    fully_shard(sharded)
    _, optimizer = train(sharded, part=rank, parts=size)
    check(sharded, expected, "FSDP2")

    model_state, optimizer_state = get_state_dict(sharded, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory / f"{size}")
    loaded = make_model()
    for block in loaded:
        block[0].weight.data.zero_()
        fully_shard(block)
    fresh = torch.optim.AdamW(loaded.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(loaded, fresh)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory / f"{size}")
    set_state_dict(loaded, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    check(loaded, expected, "DCP")
    twice = copy.deepcopy(alone)
    train(loaded, part=rank, parts=size, optimizer=fresh)
    continued = torch.optim.AdamW(twice.parameters(), lr=1e-2)
    again = make_model()
    _, continued = train(again)
    train(again, optimizer=continued)
    check(loaded, again.state_dict(), "resumed from DCP")

    mesh = init_device_mesh("cpu", (size,))
    tensor_parallel = make_model()
    for block in tensor_parallel:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(tensor_parallel)
    check(tensor_parallel, expected, "tensor parallel")

    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
        hybrid = make_model()
        for block in hybrid:
            fully_shard(block, mesh=mesh)
        fully_shard(hybrid, mesh=mesh)
        train(hybrid, part=rank, parts=size)
        check(hybrid, expected, "HSDP")
    if size in (2, 4):
        pipelines(rank, size, expected)
    dist.destroy_process_group()
    print(f"rank {rank} agrees", flush=True)


def pipelines(rank: int, size: int, expected: dict[str, torch.Tensor]) -> None:
    for kind in (ScheduleGPipe, Schedule1F1B):
        whole = make_model()
        per_stage = len(whole) // size
        mine = torch.nn.Sequential(*whole[per_stage * rank : per_stage * (rank + 1)])
        stage = PipelineStage(mine, rank, size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        for step in range(STEPS):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            arguments = (inputs,) if rank == 0 else ()
            schedule.step(*arguments, **({"target": targets} if rank == size - 1 else {}))
            optimizer.step()
        own = {
            f"{per_stage * rank + int(name.split('.', 1)[0])}.{name.split('.', 1)[1]}": value
            for name, value in mine.state_dict().items()
        }
        for name, value in own.items():
            assert float((value - expected[name]).abs().max() / expected[name].abs().max()) < RELATIVE, name
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
