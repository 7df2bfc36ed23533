"""Puts a model's pipeline stages on ranks of a mesh: pipeline x data x tensor, or pipeline x node x local x tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hpctrain.comm import World, agreed
from hpctrain.distributed.blocks import repeated_blocks
from hpctrain.distributed.open_groups import open_process_group
from hpctrain.distributed.pipeline import (
    Pipeline,
    Stages,
    check_held_by_layers,
    divide_into_stages,
    release_others,
)
from hpctrain.distributed.plan import ParallelPlan
from hpctrain.distributed.sharded_tensors import PIPELINE_AXIS, mark_sharded, note_mesh
from hpctrain.distributed.split_model import broadcast_model, check_plan, checkpoint_activations
from hpctrain.distributed.tensor_parallel import TensorSplit, mark_split, split_layers
from hpctrain.errors import TopologyError, UsageError
from hpctrain.topology import ParallelMesh, Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def put_in_pipeline(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    layers: Callable[[], Sequence[nn.Module]],
    world: World,
    topology: Topology,
    device: torch.device,
    timeout_s: float = 600.0,
) -> bool:
    """Splits `model` into pipeline stages as `plan` says, and leaves this rank its stages. Collective.

    The model is changed in place. Rank 0's parameters and buffers are copied to all ranks first. The ranks of a stage
    then split the layers of the stage, if `plan.tensor` is above 1, and shard the parameters of the stage, if the plan
    says so. Afterwards `pipeline_of(model)` returns the `Pipeline` that computes.

    Args:
        layers: A function that returns the modules of the model, in the order in which forward calls them.
        timeout_s: The time limit of NCCL's operations in seconds.

    Returns:
        True if the call has initialised `torch.distributed`, as in `parallelize`.

    Raises:
        UsageError: On every rank, with nothing changed, if the plan does not match the model.
        TopologyError: On every rank, with nothing changed, if the plan does not match the ranks.
        LaunchError: If there is no MPI.
    """

    def check() -> tuple[_StageRanks, Stages]:
        ranks = _StageRanks.plan(plan, topology)
        check_plan(model, plan)
        found = list(layers())
        stages = divide_into_stages(model, found, num_stages=plan.pipeline * plan.stages_per_rank)
        if plan.shard == "parameters":
            check_held_by_layers(model, found)
        return ranks, stages

    ranks, stages = agreed(world, check, os_error=UsageError)
    opens = not torch.distributed.is_initialized()
    if opens:
        open_process_group(world, topology, device=device, timeout_s=timeout_s)
    if plan.activation_checkpointing != "none":
        checkpoint_activations(model, plan.activation_checkpointing)
    broadcast_model(world, model)
    state = {
        name: torch.empty_like(value, device="meta")
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    # Every rank takes part in the creation of every group, in this order.
    groups = [torch.distributed.new_group(list(each), sort_ranks=False) for each in ranks.pipelines]
    opened = world.open_group(next(each for each in ranks.stages if world.rank in each))
    replicas = opened[0] if opened is not None else world.split(ranks.stages)
    assert replicas is not None  # every rank has a stage
    place = next(i for i, each in enumerate(ranks.pipelines) if world.rank in each)
    mesh = ranks.mesh(device) if plan.tensor > 1 or plan.shard == "parameters" else None
    if mesh is not None and plan.tensor > 1:
        of_stage = mesh[(*ranks.data_axes, "tensor")]
        split_layers(model, plan.tensor_plan, mesh=of_stage)
        mark_split(model, TensorSplit(mesh=of_stage, by_fsdp=plan.shard == "parameters"))
    mine = ranks.pipelines[place].index(world.rank)
    own = [number for number in range(stages.num_stages) if number % plan.pipeline == mine]
    release_others(model, stages, own=own)
    pipeline = Pipeline(
        model, stages, state=state, world=world, pipelines=ranks.pipelines, group=groups[place], replicas=replicas,
        plan=plan, device=device,
    )  # fmt: skip
    if mesh is not None and plan.shard == "parameters":
        for stage in pipeline.own_stages:
            _shard_stage(stage, mesh=mesh[ranks.data_axes])
    mark_sharded(model, plan.shard)
    return opens


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageRanks:
    """The world ranks of a pipeline mesh.

    Attributes:
        pipelines: For each pipeline, its ranks in the order of their stages.
        stages: For each stage, its ranks, ascending.
        grid: The ranks on the axes pipeline, `data_axes` and tensor. The ranks of one group along `data_axes` or tensor
            ascend, as PyTorch requires.
    """

    pipelines: tuple[tuple[int, ...], ...]
    stages: tuple[tuple[int, ...], ...]
    grid: NDArray[np.int64]
    data_axes: tuple[str, ...]

    @classmethod
    def plan(cls, plan: ParallelPlan, topology: Topology) -> _StageRanks:
        """Places the ranks. Raises TopologyError if they do not match the plan."""
        mesh = ParallelMesh.plan(topology, pipeline=plan.pipeline, tensor=plan.tensor)
        ranks = np.array(mesh.ranks, dtype=np.int64)  # (pipeline, node, local, tensor)
        pipelines = tuple(mesh.pipeline_axis(rank).ranks for rank in ranks[0].ravel().tolist())
        data_axes: tuple[str, ...] = ("data",)
        if plan.shard_within == "node" and len(mesh.data_grid()) > 1:
            grid, data_axes = ranks, ("node", "local")
        else:
            rows = [sorted(stage.reshape(-1, plan.tensor).tolist()) for stage in ranks]
            grid = np.array(rows)
        if any((np.diff(grid, axis=axis) < 0).any() for axis in range(1, grid.ndim)):
            raise TopologyError(
                f"pipeline = {plan.pipeline} with shard or tensor needs ranks that are numbered node by node, or "
                "round-robin over the nodes; the ranks of each node here are "
                f"{[list(node) for node in topology.ranks_by_node]}. Start the ranks so that they are numbered node "
                "by node"
            )
        stages = tuple(tuple(sorted(stage.ravel().tolist())) for stage in ranks)
        return cls(pipelines=pipelines, stages=stages, grid=grid, data_axes=data_axes)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Creates the process groups of PyTorch's mesh of all ranks, and returns the mesh. Collective."""
        from torch.distributed.device_mesh import DeviceMesh

        axes = (PIPELINE_AXIS, *self.data_axes, "tensor")
        mesh = DeviceMesh(device.type, torch.from_numpy(self.grid), mesh_dim_names=axes)
        note_mesh(mesh)
        return mesh


def _shard_stage(stage: nn.Module, *, mesh: DeviceMesh) -> None:
    """Shards the parameters of a stage with FSDP2 over `mesh`, each of its blocks separately. Collective.

    The parameters are gathered once per step and kept whole until the last micro-batch. Until then whole gradients are
    added up on each rank; they are reduced over the ranks once per step.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in (*repeated_blocks(stage).values(), stage):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # The loss carries the weight (ADR 5): gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
