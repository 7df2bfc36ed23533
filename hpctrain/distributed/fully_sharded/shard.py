"""Shards parameters by FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from hpctrain.distributed.blocks import repeated_blocks, tied_across
from hpctrain.distributed.fully_sharded.overlap import overlap_communication
from hpctrain.distributed.fully_sharded.passes import free_after_evaluation, sharded_modules
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_parameters(model: nn.Module, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shards the parameters of each repeated block, and what is left, by FSDP2 over `mesh`. Collective.

    Of a mesh with two axes, `node` and `local`, over the second, with a replica for each index of the first.
    offload: the parts, their gradients and the optimizer's state are in page-locked host memory, where the optimizer
    steps. It was never run: see docs/gpu.md.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    blocks = repeated_blocks(model)
    for number, block in enumerate(blocks.values(), start=1):
        # Backward begins with the last one, which would be gathered again at once.
        fully_shard(block, mesh=mesh, offload_policy=policy, reshard_after_forward=number < len(blocks))
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for module in sharded_modules(model):
        # The loss carries the weight (ADR 5): gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if mesh.device_type == "cpu":
        overlap_communication(model, blocks, num_axes=mesh.ndim)
    free_after_evaluation(model)


def check_shardable(model: nn.Module) -> None:
    """Raises UsageError for what FSDP2 cannot shard, or would train wrongly, and if this PyTorch's FSDP2 is too old."""
    import torch.distributed.fsdp as fsdp

    # The newest of what `passes` and `overlap` call.
    if not hasattr(getattr(fsdp, "FSDPModule", None), "reset_iter_state"):
        raise UsageError(
            f"FSDP2 of PyTorch {torch.__version__} is too old to shard parameters: it has no reset_iter_state. "
            "Use PyTorch 2.13 or newer, or shard = 'gradients'"
        )
    if getattr(model.forward, "__func__", None) is nn.Module.forward:  # a ModuleList
        raise UsageError(
            f"{type(model).__name__} has no forward, in which its parameters would be gathered: give a module whose "
            "forward calls its parts, or shard each part, with an updater each"
        )
    blocks = repeated_blocks(model)
    for known, name in tied_across(model, blocks):
        raise UsageError(
            f"{known} and {name} are one parameter, in different blocks, which are sharded apart: untie them, or leave "
            "shard = 'parameters' out"
        )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UsageError(f"{name} has no dimension along which it can be sharded: give it the shape (1,)")
        if parameter.numel() == 0 and parameter.requires_grad:
            raise UsageError(
                f"{name} has the shape {tuple(parameter.shape)}, without elements, and its gradient cannot be sharded: "
                "remove it, or set requires_grad to False"
            )
    _check_dtypes(model, blocks)
    check_dense(model)


def _check_dtypes(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raises UsageError if the gradients of a block, or of what is outside the blocks, differ in dtype."""
    of_block = {id(p): name for name, block in blocks.items() for p in block.parameters()}
    first: dict[str | None, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        block = of_block.get(id(parameter))
        other, dtype = first.setdefault(block, (name, parameter.dtype))
        if dtype != parameter.dtype:
            where = "outside the blocks" if block is None else f"in the block {block}"
            raise UsageError(
                f"{other} is {dtype} and {name} {parameter.dtype}, both {where}, whose gradients are summed together: "
                "give them one dtype, or leave shard = 'parameters' out"
            )


def check_dense(model: nn.Module) -> None:
    """Raises UsageError for a module that makes sparse gradients."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise UsageError(
                f"{name} makes sparse gradients, which cannot be sharded: make it with sparse=False"
            )
