"""Peers: torch's DDP, ZeroRedundancyOptimizer and FSDP2 on Gloo, as their documentation shows them.

Those whose ranks compute samples together are in `dividing_peers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks.parallel.timed.dividing_peers import (
    OPTIONS,
    Step,
    ordinary_steps,
    pipeline_stepper,
    tensor_stepper,
)
from benchmarks.parallel.workloads import Language


def start_gloo() -> tuple[int, int]:
    """Initialises torch.distributed from the environment (env://); returns rank and number of ranks. Collective.

    torchrun has set the variables; under srun they are those of Slurm.
    """
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def stepper(method: str, workload: Language, *, batch: int) -> Step:
    """Returns the function that makes a step. Collective.

    method: name of the peer. batch: samples of each rank; the ranks have equally many, so the mean of their gradients
    is that of the loss.
    """
    if method in _DIVIDING:
        return _DIVIDING[method](workload, batch=batch)
    torch.manual_seed(0)
    model, optimizer = _METHODS[method](workload.task.build_model())
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return ordinary_steps(workload, model, optimizer, ranks=[rank], num_ranks=num_ranks, batch=batch)


Made = tuple[nn.Module, torch.optim.Optimizer]


def _ddp(model: nn.Module) -> Made:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), **OPTIONS)


def _ddp_fp16(model: nn.Module) -> Made:
    wrapped, optimizer = _ddp(model)
    wrapped.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    return wrapped, optimizer


def _zero(model: nn.Module) -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **OPTIONS
    )
    return wrapped, optimizer


def _fsdp2(model: nn.Module) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    *others, last = model.blocks  # type: ignore[union-attr,misc]
    for block in others:
        fully_shard(block, mesh=mesh)
    fully_shard(last, mesh=mesh, reshard_after_forward=False)  # backward needs it at once
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **OPTIONS)


_METHODS: dict[str, Callable[[nn.Module], Made]] = {
    "ddp": _ddp, "ddp-fp16": _ddp_fp16, "zero": _zero, "fsdp2": _fsdp2,
}  # fmt: skip
_DIVIDING: dict[str, Callable[..., Step]] = {"tensor": tensor_stepper, "pipeline": pipeline_stepper}
