"""Peers whose ranks compute samples together: torch's tensor groups and pipelines on Gloo, each times data parallel.

Written as in the documentation of torch.distributed.tensor.parallel and torch.distributed.pipelining: a mesh of two
axes, the layers of one plan, a stage built of the model's layers by hand. They split the model as hpctrain's layouts do
that they are held against. A group or pipeline trains on the samples of all of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.parallel.layouts import LAYOUTS
from benchmarks.parallel.timed.waiting import Stepped
from benchmarks.parallel.workloads import Language, of_ranks

Step = Callable[[int], Stepped]
OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}  # of AdamW, also of the other peers
_DIVISION = 2  # ranks of a tensor group, stages of a pipeline


def ordinary_steps(
    workload: Language,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Sequence[int],
    num_ranks: int,
    batch: int,
) -> Step:
    """Returns the function that makes a step of forward, backward and update on the samples of `ranks`.

    num_ranks: of all. batch: samples of each rank.
    """

    def step(number: int) -> Stepped:
        fields = of_ranks(workload, ranks, number=number, num_ranks=num_ranks, samples=batch)
        optimizer.zero_grad()
        loss = workload.task.loss(model, fields)
        loss.backward()
        optimizer.step()
        return Stepped(loss=float(loss.detach()))

    return step


def tensor_stepper(workload: Language, *, batch: int) -> Step:
    """Returns the function that makes a step with tensor groups of 2, over which DDP sums. Collective.

    batch: samples of each rank.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks // _DIVISION, _DIVISION), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: nn.Module = workload.task.build_model()
    for block in model.blocks:  # type: ignore[union-attr]
        plan = {
            "attention_in": ColwiseParallel(),
            "attention_out": RowwiseParallel(),
            "feed_forward.0": ColwiseParallel(),
            "feed_forward.2": RowwiseParallel(),
        }
        parallelize_module(block, mesh["tp"], plan)
    if mesh["dp"].size() > 1:
        model = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    ranks = _sharing(mesh["dp"].get_local_rank())
    return ordinary_steps(workload, model, optimizer, ranks=ranks, num_ranks=num_ranks, batch=batch)


def pipeline_stepper(workload: Language, *, batch: int) -> Step:
    """Returns the function that makes a step with pipelines of 2 by 1F1B, over which DDP sums. Collective.

    batch: samples of each rank.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (_DIVISION, num_ranks // _DIVISION), mesh_dim_names=("pp", "dp"))
    index = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    layers = workload.task.build_model().layers()  # type: ignore[operator]
    half = 1 + workload.layers // 2  # the embeddings are before the first block
    module: nn.Module = nn.Sequential(*(layers[half:] if index else layers[:half]))
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)
    if mesh["dp"].size() > 1:
        module = nn.parallel.DistributedDataParallel(
            module, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
        )
    stage = PipelineStage(module, index, _DIVISION, torch.device("cpu"), group=mesh.get_group("pp"))

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(
        stage, n_microbatches=LAYOUTS["pipeline-2"].options["micro_batches"], loss_fn=loss_of
    )
    ranks = _sharing(mesh["dp"].get_local_rank())

    def step(number: int) -> Stepped:
        fields = of_ranks(workload, ranks, number=number, num_ranks=num_ranks, samples=batch)
        tokens = fields["tokens"]
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if index == 0:
            schedule.step(tokens[:, :-1], return_outputs=False)
        else:
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        # Of the ranks of a pipeline one has the loss: the mean of the ranks is then that of the pipelines.
        return Stepped(loss=_DIVISION * fmean(float(loss.detach()) for loss in losses) if losses else 0.0)

    return step


def _sharing(group: int) -> range:
    """Returns the ranks whose samples the ranks of tensor group or pipeline number `group` train on."""
    return range(_DIVISION * group, _DIVISION * (group + 1))
