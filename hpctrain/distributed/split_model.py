"""Shards a model's parameters over the ranks by FSDP2, and leaves out activations that backward computes again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.comm import World, agreed, broadcast_tensors
from hpctrain.distributed.blocks import repeated_blocks, tied_across
from hpctrain.distributed.open_groups import open_process_group
from hpctrain.distributed.pipeline import Pipeline
from hpctrain.distributed.plan import ParallelPlan
from hpctrain.distributed.sharded_tensors import is_sharded_tensor, mark_sharded
from hpctrain.distributed.stages import Stages, divide, release_others
from hpctrain.errors import UsageError
from hpctrain.topology import ParallelMesh, Topology


def parallelize(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    world: World,
    topology: Topology,
    device: torch.device,
    timeout_s: float = 600.0,
) -> bool:
    """Splits `model` as `plan` says, in place. Collective; before its optimizer is made.

    With sharded parameters rank 0's parameters and buffers are copied to all ranks first, and forward and backward are
    collective afterwards. timeout_s: of NCCL's operations. Returns True if it has initialised `torch.distributed`,
    which the caller then ends. Raises UsageError or TopologyError on every rank for a plan that does not fit model or
    ranks, and changes nothing then; LaunchError without MPI.
    """

    def check() -> Sequence[Sequence[int]]:
        if plan.pipeline > 1:
            raise UsageError(
                f"pipeline = {plan.pipeline}: recipes train in pipelines. In a loop of your own use "
                "torch.distributed.pipelining over hpctrain.init_process_group(): see guides/torch-distributed.md"
            )
        if plan.activation_checkpointing == "blocks":
            _check_blocks(model)
        if plan.shard == "none":
            return ()
        _check_shardable(model)
        mesh = ParallelMesh.plan(topology)
        return mesh.data_grid() if plan.shard_within == "node" else (mesh.data_ranks(),)

    groups = agreed(world, check, os_error=UsageError)
    opens = bool(groups) and not torch.distributed.is_initialized()
    if opens:
        open_process_group(world, topology, device=device, timeout_s=timeout_s)
    if plan.activation_checkpointing == "blocks":
        checkpoint_activations(model)
    if groups:
        broadcast_model(world, model)
        _shard_parameters(model, groups, device=device)
        mark_sharded(model)
    return opens


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
    """Leaves `model` on this rank only its stages of a pipeline, as `plan` says, in place. Collective.

    layers: returns the model's modules that are called one after another. Rank 0's parameters and buffers are copied
    to all ranks first. `pipeline_of(model)` then computes. timeout_s and the result are those of `parallelize`. Raises
    UsageError or TopologyError on every rank for a plan that does not fit model or ranks, and changes nothing then;
    LaunchError without MPI.
    """

    def check() -> tuple[ParallelMesh, Stages]:
        mesh = ParallelMesh.plan(topology, pipeline=plan.pipeline)
        if plan.activation_checkpointing == "blocks":
            _check_blocks(model)
        return mesh, divide(model, layers(), num_stages=plan.pipeline * plan.stages_per_rank)

    mesh, stages = agreed(world, check, os_error=UsageError)
    opens = not torch.distributed.is_initialized()
    if opens:
        open_process_group(world, topology, device=device, timeout_s=timeout_s)
    if plan.activation_checkpointing == "blocks":
        checkpoint_activations(model)
    broadcast_model(world, model)
    of_stage = [mesh.data_ranks(stage=stage) for stage in range(plan.pipeline)]
    pipelines = list(zip(*of_stage, strict=True))
    # Every rank takes part in making every group, in this order.
    groups = [torch.distributed.new_group(list(ranks)) for ranks in pipelines]
    replicas = world.split(of_stage)
    assert replicas is not None  # every rank has a stage
    place = next(i for i, ranks in enumerate(pipelines) if world.rank in ranks)
    own = [
        number
        for number in range(stages.num_stages)
        if pipelines[place][number % plan.pipeline] == world.rank
    ]
    release_others(model, stages, own=own)
    Pipeline(
        model, stages, world=world, pipelines=pipelines, group=groups[place], replicas=replicas, plan=plan,
        device=device,
    )  # fmt: skip
    return opens


def end_process_group() -> None:
    """Ends `torch.distributed`, unless the program has. Collective."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def broadcast_model(world: World, model: nn.Module) -> None:
    """Copies rank 0's parameters and buffers to all ranks. Collective. Raises UsageError if they are split."""
    if any(map(is_sharded_tensor, model.parameters())):
        raise UsageError(
            "FSDP or DTensor has split this model: use session.parallelize instead, or train it without an updater",
            agreed=True,
        )
    broadcast_tensors(world, [*model.parameters(), *model.buffers()], root=0, name="the model")


def checkpoint_activations(model: nn.Module) -> int:
    """Makes each repeated block keep only its inputs in forward; backward runs its forward again. Not collective.

    Names of parameters stay as they are. Random numbers (dropout) are the same in both runs. Returns the number of
    blocks. Raises UsageError if the model has no repeated blocks, or batch normalisation in one: its running
    statistics would be updated twice a step.
    """
    blocks = _check_blocks(model)
    for block in blocks.values():
        block.forward = functools.partial(_checkpointed, block.forward)
    return len(blocks)


def _check_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the repeated blocks; raises UsageError if their forward cannot run twice, or there are none."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise UsageError(
            "activation checkpointing goes by repeated blocks, of which the model has none: put its layers, modules of "
            "one class with children, into an nn.Sequential or nn.ModuleList, or leave activation_checkpointing out"
        )
    for name, block in blocks.items():
        for inner, module in block.named_modules():
            if isinstance(module, _BatchNorm):
                raise UsageError(
                    f"activation checkpointing would update the running statistics of {name}.{inner} "
                    f"({type(module).__name__}) twice a step: use another normalisation, such as nn.GroupNorm, or "
                    "leave activation_checkpointing out"
                )
    return blocks


def _checkpointed(forward: object, *args: object, **kwargs: object) -> object:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # type: ignore[arg-type]


def _shard_parameters(model: nn.Module, groups: Sequence[Sequence[int]], *, device: torch.device) -> None:
    """Shards the parameters of each repeated block, and what is left, by FSDP2 over each of `groups`. Collective."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if len(groups) > 1:
        mesh = DeviceMesh(device.type, torch.tensor(groups), mesh_dim_names=("node", "local"))
    else:
        mesh = DeviceMesh(device.type, torch.tensor(groups[0]), mesh_dim_names=("data",))
    for module in (*repeated_blocks(model).values(), model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss carries the weight (ADR 5): gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _check_shardable(model: nn.Module) -> None:
    """Raises UsageError for what FSDP2 cannot shard, or would train wrongly."""
    for known, name in tied_across(model, repeated_blocks(model)):
        raise UsageError(
            f"{known} and {name} are one parameter, in different blocks, which are sharded apart: untie them, or leave "
            "shard = 'parameters' out"
        )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UsageError(f"{name} has no dimension along which it can be sharded: give it the shape (1,)")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise UsageError(
                f"{name} makes sparse gradients, which cannot be sharded: make it with sparse=False"
            )
