"""Splits a model over the ranks: layers with DTensor, parameters with FSDP2. Also adds activation checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.comm import World, agreed, broadcast_tensors
from hpctrain.distributed.blocks import name_blocks, repeated_blocks
from hpctrain.distributed.fully_sharded import check_dense, check_shardable, shard_parameters
from hpctrain.distributed.open_groups import open_process_group
from hpctrain.distributed.plan import ParallelPlan, Recomputation
from hpctrain.distributed.sharded_tensors import is_sharded_tensor, mark_sharded, note_mesh
from hpctrain.distributed.tensor_parallel import TensorSplit, check_tensor_plan, mark_split, split_layers
from hpctrain.errors import UsageError
from hpctrain.topology import ParallelMesh, Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Decides which results a checkpointed block keeps instead of recomputing them in backward.
#
# Source: Korthikanti et al. 2022, arXiv:2205.05198 (selective activation recomputation); the mechanism is
# PyTorch's.


# Names in `torch.ops.aten`: most of a block's arithmetic is in these. What is left (activation functions,
# normalisation, dropout, copies) takes memory bandwidth only. Which attention runs depends on device, dtype and mask.
_KEPT_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_addmm_activation", "linear", "_scaled_mm",
    "convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "cudnn_convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a block's forward and of its recomputation, for `torch.utils.checkpoint.checkpoint`.

    The results of matrix products, convolutions and attention are kept; all other results are recomputed.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
        create_selective_checkpoint_contexts(_policy)
    )
    return contexts


def keeps(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if forward keeps the result of `operation(*args, **kwargs)`, an operation of `torch.ops.aten`.

    Attention with dropout is recomputed. If its result were kept, the recomputation would not draw the random numbers
    of the attention, so that later dropouts would draw other numbers than in forward.
    """
    if operation not in _kept():
        return False
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return float(given) == 0.0
    return True


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = keeps(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _kept() -> frozenset[Any]:
    """Returns the operations whose results forward keeps for backward: those of `_KEPT_NAMES`, with all overloads.

    Names that this PyTorch lacks are left out.
    """
    packets = [getattr(torch.ops.aten, name) for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


# Splits a model over the ranks.


def parallelize(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    world: World,
    topology: Topology,
    device: torch.device,
    timeout_s: float = 600.0,
) -> bool:
    """Splits `model` over the ranks as `plan` says, in place. Collective. Call it before the optimizer is made.

    With sharded parameters or split layers, rank 0's parameters and buffers are copied to all ranks first, and forward
    and backward are collective afterwards. Optimizer state and gradients are sharded later, by the updater, which reads
    the plan's choice from the model.

    Args:
        model: The model.
        plan: What is split, over which ranks.
        world: The communicator of all ranks.
        topology: The ranks of each node.
        device: The device of this rank.
        timeout_s: The time limit of NCCL's operations in seconds.

    Returns:
        True if the call has initialised `torch.distributed`; the caller then ends it with `end_process_group`.

    Raises:
        UsageError: On every rank, with nothing changed, if the plan does not match the model.
        TopologyError: On every rank, with nothing changed, if the plan does not match the ranks.
        LaunchError: If there is no MPI.
    """

    def check() -> _Placement | None:
        if plan.pipeline > 1:
            raise UsageError(
                f"pipeline = {plan.pipeline}: recipes train in pipelines. In a loop of your own use "
                "torch.distributed.pipelining over hpctrain.init_process_group(): see guides/torch-distributed.md"
            )
        if plan.offload and device.type == "cpu":
            raise UsageError(
                "offload = true keeps parameters, gradients and optimizer state in host memory and computes on a GPU, "
                "but these ranks compute on CPUs, where all of that is in host memory already: leave offload out"
            )
        name_blocks(model, plan.blocks)
        check_plan(model, plan)
        return _place(plan, topology)

    placement = agreed(world, check, os_error=UsageError)
    opens = placement is not None and not torch.distributed.is_initialized()
    if opens:
        open_process_group(world, topology, device=device, timeout_s=timeout_s)
    if placement is not None:
        broadcast_model(world, model)
        mesh = placement.on(device)
        if plan.tensor > 1:
            split_layers(model, plan.tensor_plan, mesh=mesh, sequence=plan.sequence)
            mark_split(model, TensorSplit(mesh=mesh, by_fsdp=plan.shard == "parameters"))
    if plan.activation_checkpointing != "none":
        checkpoint_activations(model, plan.activation_checkpointing)
    shard_mesh = None
    if placement is not None and plan.shard == "parameters":
        shard_mesh = mesh[placement.data_axes] if plan.tensor > 1 else mesh
        shard_parameters(model, shard_mesh, offload=plan.offload)
    mark_sharded(model, plan.shard, mesh=shard_mesh)
    return opens


def check_plan(model: nn.Module, plan: ParallelPlan) -> None:
    """Raises UsageError if `model` cannot be split as `plan` says, whatever the ranks. Does not communicate."""
    if plan.activation_checkpointing != "none":
        _check_blocks(model, plan.activation_checkpointing)
    if plan.tensor > 1:
        check_tensor_plan(model, plan.tensor_plan, tensor=plan.tensor, sequence=plan.sequence)
    if plan.shard == "parameters":
        check_shardable(model)
    elif plan.tensor > 1:
        check_dense(model)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """The world ranks on the axes of a device mesh."""

    ranks: tuple[object, ...]
    axes: tuple[str, ...]

    @property
    def data_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis != "tensor")

    def on(self, device: torch.device) -> DeviceMesh:
        """Creates the mesh and its process groups. Collective."""
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh(device.type, torch.tensor(self.ranks), mesh_dim_names=self.axes)
        note_mesh(mesh)
        return mesh


def _place(plan: ParallelPlan, topology: Topology) -> _Placement | None:
    """Returns the place of each rank in the mesh, or None if nothing is split.

    Raises TopologyError if the ranks do not match the plan.
    """
    if plan.shard != "parameters" and plan.tensor == 1:
        return None
    mesh = ParallelMesh.plan(topology, tensor=plan.tensor)
    nodes = mesh.data_grid() if plan.shard_within == "node" else ()
    if plan.tensor > 1:
        grid = np.array(mesh.ranks[0])  # (node, local, tensor)
        if len(nodes) > 1:
            return _Placement(ranks=tuple(grid.tolist()), axes=("node", "local", "tensor"))
        # Ascending even if ranks alternate between nodes, since PyTorch sorts the ranks of a group.
        return _Placement(
            ranks=tuple(sorted(grid.reshape(-1, plan.tensor).tolist())), axes=("data", "tensor")
        )
    if len(nodes) > 1:
        return _Placement(ranks=nodes, axes=("node", "local"))
    return _Placement(ranks=nodes[0] if nodes else mesh.data_ranks(), axes=("data",))


def end_process_group() -> None:
    """Ends `torch.distributed`, unless the program has ended it. Collective."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def broadcast_model(world: World, model: nn.Module) -> None:
    """Copies rank 0's parameters and buffers to all ranks. Collective.

    Raises UsageError if a parameter is a DTensor.
    """
    if any(map(is_sharded_tensor, model.parameters())):
        raise UsageError(
            "FSDP or DTensor has split this model: use session.parallelize instead, or train it without an updater",
            agreed=True,
        )
    broadcast_tensors(world, [*model.parameters(), *model.buffers()], root=0, name="the model")


def checkpoint_activations(model: nn.Module, kind: Recomputation = "blocks") -> int:
    """Makes each repeated block keep only its inputs in forward; backward runs the block's forward again.

    With `kind = "selective"` a block also keeps the results of matrix products, convolutions and attention, and
    backward recomputes the rest. Names of parameters do not change. Both runs of forward draw the same random numbers
    (dropout). Does not communicate.

    Returns the number of blocks. Raises UsageError if the model has no repeated blocks or a block contains batch
    normalisation, since the running statistics would be updated twice per step; with "selective" also for in-place
    modules.
    """
    blocks = _check_blocks(model, kind)
    run = _kept_partly if kind == "selective" else _checkpointed
    for block in blocks.values():
        block.forward = functools.partial(run, block.forward)
    return len(blocks)


def _check_blocks(model: nn.Module, kind: Recomputation) -> dict[str, nn.Module]:
    """Returns the repeated blocks. Raises UsageError if there are none, or if their forward cannot run twice."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise UsageError(
            "activation checkpointing works on repeated blocks, but none were found in this model: put its layers "
            "(modules of one class that have children) into an nn.Sequential or nn.ModuleList, name them "
            "(parallel_blocks of the task, blocks of a ParallelPlan), or leave activation_checkpointing out"
        )
    for name, block in blocks.items():
        for inner, module in block.named_modules():
            if isinstance(module, _BatchNorm):
                raise UsageError(
                    f"activation checkpointing would update the running statistics of {name}.{inner} "
                    f"({type(module).__name__}) twice per step: use another normalisation, such as nn.GroupNorm, or "
                    "leave activation_checkpointing out"
                )
            if kind == "selective" and getattr(module, "inplace", False):
                raise UsageError(
                    f"{name}.{inner} ({type(module).__name__}) overwrites its input, which activation_checkpointing = "
                    "'selective' may keep: make it with inplace=False, or use 'blocks'"
                )
    return blocks


def _checkpointed(forward: object, *args: object, **kwargs: object) -> object:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # type: ignore[arg-type]


def _kept_partly(forward: object, *args: object, **kwargs: object) -> object:
    return _checkpointed(forward, *args, context_fn=keep_products, **kwargs)
