"""Shards parameters with FSDP2, and overlaps FSDP2's communication with computation on CPUs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.distributed.blocks import repeated_blocks, tied_across
from hpctrain.distributed.sharded_tensors import shard_of
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# What forward and backward of a model sharded by FSDP2 leave on a rank: whole parameters, whole gradients,
# and the state of a pass that has failed.


_KEPT = "_hpctrain_kept_whole"
# Attributes of a sharded model, and of a module whose gradients `sum_gradients_by` sums.
_FACTOR, SUMMED_HERE = "_hpctrain_gradient_factor", "_hpctrain_sums_gradients"


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the modules of `model` to which `fully_shard` was applied, in the order of `modules`."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gradient_factor(model: nn.Module) -> float:
    """Returns the factor by which the gradients of `model` are multiplied before they are summed."""
    return float(getattr(model, _FACTOR, 1.0))


def free_after_evaluation(model: nn.Module) -> None:
    """Frees whole (gathered) parameters after each forward of `model` without gradients, except within `kept_whole`.

    FSDP2 keeps some parameters whole after forward, for backward. If no backward follows, changes that the program
    makes to `model.parameters()` would be made to the whole copies and lost.
    """
    modules = sharded_modules(model)

    def free(*_: Any) -> None:
        if not torch.is_grad_enabled() and not getattr(model, _KEPT, False):
            _reshard(modules)

    model.register_forward_hook(free)


@contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """Within the `with` block, forwards without gradients gather each parameter once and then keep it whole.

    The parameters must not change within the block; at the end of the block they are sharded again. Does nothing for a
    model without sharded parameters. Every rank must enter the block; entering does not communicate.
    """
    if shard_of(model) != "parameters":
        yield
        return
    setattr(model, _KEPT, True)
    try:
        yield
    finally:
        setattr(model, _KEPT, False)
        _reshard(sharded_modules(model))


@final
class ShardedPasses:
    """Controls when gradients of a model sharded by FSDP2 are summed over the ranks, kept and dropped.

    Every rank must call each method the same number of times; only `sum_whole_gradients` communicates. A whole gradient
    is one that is not sharded yet.

    plain_factor: the factor by which the gradients of a backward outside of `weighted` are multiplied, until `close`.
    """

    def __init__(self, model: nn.Module, *, plain_factor: float = 1.0) -> None:
        self._root: Any = model
        self._modules = sharded_modules(model)
        self._sums = True
        self._may_hold_gradients = False
        self._owners: list[nn.Module | torch.optim.Optimizer] = []
        self._plain_factor = plain_factor
        self._set_factor(plain_factor)

    @contextmanager
    def weighted(self) -> Iterator[None]:
        """Within the `with` block, the gradients of a backward are summed without a factor."""
        self._set_factor(1.0)
        try:
            yield
        finally:
            self._set_factor(self._plain_factor)

    def drop_with(self, owner: nn.Module | torch.optim.Optimizer) -> None:
        """Makes `owner.zero_grad` also drop gradients that are not summed over the ranks yet, until `close`.

        Otherwise gradients that were added up in `without_sums` would be added to the gradients of a later step.
        """
        zero_grad = owner.zero_grad

        def zero_all(*arguments: Any, **options: Any) -> None:
            zero_grad(*arguments, **options)
            self.drop_gradients()

        owner.zero_grad = zero_all  # type: ignore[method-assign]
        self._owners.append(owner)

    def close(self) -> None:
        self._set_factor(1.0)
        while self._owners:
            vars(self._owners.pop()).pop("zero_grad", None)

    def _set_factor(self, factor: float) -> None:
        setattr(self._root, _FACTOR, factor)
        for module in self._modules:
            if not getattr(module, SUMMED_HERE, False):
                module.set_gradient_divide_factor(1.0 / factor)

    @property
    def backward_has_failed(self) -> bool:
        """True if a backward has raised an error since the last `drop_gradients` or `end_step`."""
        # FSDP2 sets it when backward begins, and clears it at its end.
        return any(state._state_ctx.post_backward_final_callback_queued for state in self._states())

    @property
    def _forward_has_failed(self) -> bool:
        return any(state._state_ctx.iter_forward_root is not None for state in self._states())

    @contextmanager
    def without_sums(self) -> Iterator[None]:
        """Within the `with` block, backward only adds up gradients on each rank; they are neither summed nor sharded.

        The next backward outside of the block sums these gradients over the ranks.
        """
        before, self._sums = self._sums, False
        self._may_hold_gradients = True
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sums = before
            self._root.set_requires_gradient_sync(before)

    def sum_whole_gradients(self) -> None:
        """Sums over the ranks the gradients that no backward has summed since `without_sums`. Collective.

        The gradients of a backward that has failed are not summed.
        """
        if self._may_hold_gradients and not self.backward_has_failed:
            self._root.set_requires_gradient_sync(True)
            # As PyTorch's own pipelines end a step: it sums and shards what is still whole.
            self._root._get_fsdp_state()._root_post_backward_final_callback()
            self._root.set_requires_gradient_sync(self._sums)
        self._may_hold_gradients = False

    def drop_gradients(self) -> None:
        """Drops gradients that are not summed over the ranks yet, and the state of a failed pass.

        `optimizer.zero_grad` does not see these gradients. Gathered parameters are kept unless a pass has failed, since
        a backward that needs them may follow.
        """
        if self.backward_has_failed or self._forward_has_failed:
            self._reset()
        for state in self._states():
            for group in state._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    # Since PyTorch 2.15 it is a property without a setter that reads the gradient of the next line.
                    if "unsharded_accumulated_grad" in vars(parameter):
                        parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
        self._may_hold_gradients = False

    def end_step(self) -> None:
        """Frees the whole copies of parameters that `step` has updated, and the state of all earlier passes."""
        self._reset()
        _reshard(self._modules)

    def _reset(self) -> None:
        for module, state in zip(self._modules, self._states(), strict=True):
            if state._is_root:
                module.reset_iter_state()

    def _states(self) -> list[Any]:
        return [module._get_fsdp_state() for module in self._modules]


def _reshard(modules: list[Any]) -> None:
    for module in modules:
        module.reshard()


# Lets FSDP2 communicate while the CPU computes.
#
# On GPUs it overlaps the two by streams. CPUs have none, so each of its operations would block. Through its
# hooks they are started here, and waited for when their result is needed (ADR 59).


class StartSum(Protocol):
    """A function that starts a sum over the ranks, and returns its handle, on which the caller waits.

    The function sums `values`, shape (num_ranks * n,), and writes this rank's part of the sum into `out`, shape (n,).
    group: FSDP2's process group.
    """

    def __call__(self, values: torch.Tensor, *, out: torch.Tensor, group: Any) -> dist.Work: ...


def overlap_communication(model: nn.Module, blocks: Mapping[str, nn.Module], *, num_axes: int) -> None:
    """Overlaps FSDP2's communication with computation on a CPU. Does not communicate itself.

    While a block computes, the parameters of the block that is computed next are gathered. In backward, the gradients
    of a block are summed while backward of the next block runs. This needs memory for the parameters of one more block,
    or for the gradients of one block as they are sent.

    Args:
        model: A model sharded by `fully_shard`.
        blocks: The blocks of the model in the order in which forward runs them. A block that runs out of order is
            gathered when it is needed.
        num_axes: The number of axes of the mesh. With two axes (shards within a node) backward still waits for the
            sums, since the sum between the nodes follows at once.
    """
    gather = _Gather()
    modules: list[Any] = [model, *blocks.values()]
    for module in modules:
        module.set_custom_all_gather(gather)
    _gather_ahead(modules)
    if num_axes == 1:
        sum_gradients_by(start_group_sum, model)


def _gather_ahead(modules: Sequence[Any]) -> None:
    """Makes the model and each block gather the parameters of the next block before their own forward.

    Parameters that were gathered for a block that did not run are dropped at the end of the model's forward, since they
    may be loaded again before the next forward.
    """
    unused: dict[int, Any] = {}

    def runs(module: Any, following: Any) -> None:
        unused.pop(id(module), None)
        if following is not None:
            unused[id(following)] = following

    def drop(*_: Any) -> None:
        for block in unused.values():
            block.unshard()  # ends what has begun
            block.reshard()
        unused.clear()

    for module, following in itertools.zip_longest(modules, modules[1:]):
        if following is not None:
            module.set_modules_to_forward_prefetch([following])
        module.register_forward_pre_hook(lambda module, _, following=following: runs(module, following))
    modules[0].register_forward_hook(drop)


def sum_gradients_by(start: StartSum, model: nn.Module) -> None:
    """Makes FSDP2 sum the gradients of `model` with the function `start`. Does not communicate itself.

    The model must be sharded over one axis of ranks. At most one sum runs at a time, and all sums have ended when
    backward ends. Backward waits for a sum at once if the sum is added to an existing gradient, or if a hook of a
    parameter reads the sum.
    """
    unfinished = _Unfinished()
    sharded = sharded_modules(model)
    for module in sharded:
        module.reshard()  # after a forward without backward some are whole
    for module in sharded:
        within = [inner for inner in sharded_modules(module) if inner is not module]
        others = {id(parameter) for inner in within for parameter in inner.parameters()}
        own = [parameter for parameter in module.parameters() if id(parameter) not in others]
        factor = partial(gradient_factor, model)
        module.set_custom_reduce_scatter(_ReduceScatter(start, own, unfinished=unfinished, factor=factor))
        setattr(module, SUMMED_HERE, True)


def start_group_sum(values: torch.Tensor, *, out: torch.Tensor, group: Any) -> dist.Work:
    """Starts the sum with an operation of the process group. Implements `StartSum`. Collective."""
    work = dist.reduce_scatter_single(out, values, group=group, op=dist.ReduceOp.SUM, async_op=True)
    assert work is not None
    return work


class _Allocating:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _Gather(_Allocating):
    """Implements FSDP2's `AllGather`. FSDP2 calls the object to gather the parameters of a group."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Starts gathering parameters, and returns a handle. Collective.

        FSDP2 waits on the handle before it uses the parameters.
        """
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)


@final
class _Unfinished:
    """The sum that backward has started but not waited for yet. A model has at most one such sum."""

    def __init__(self) -> None:
        self._work: dist.Work | None = None

    def start(self, begin: Callable[[], dist.Work]) -> None:
        """Waits for the previous sum, and starts the next one by `begin()`.

        The sum ends before the running backward ends.
        """
        self.wait()
        self._work = begin()
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        except RuntimeError:  # no backward runs: a pipeline reduces after it
            self.wait()

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()


@final
class _ReduceScatter(_Allocating):
    """Implements FSDP2's `ReduceScatter`. FSDP2 calls the object with the gradients of a group of parameters.

    parameters: the sharded parameters of the group.
    factor: function that returns the factor of the gradients, which is applied here before the sum. FSDP2 would apply
    the factor directly after the call, when the sum has not ended yet.
    """

    def __init__(
        self,
        start: StartSum,
        parameters: Sequence[Any],
        *,
        unfinished: _Unfinished,
        factor: Callable[[], float],
    ) -> None:
        self._start = start
        self._factor = factor
        self._parameters = parameters
        self._unfinished = unfinished

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sums `input_tensor`, shape (num_ranks * n,), into `output_tensor`, shape (n,). Collective."""
        if op != dist.ReduceOp.SUM:
            raise UsageError(
                f"FSDP2 asks to reduce gradients by {op}, but the gradients of this model must be summed: set no "
                "gradient divide factor on its modules"
            )
        if (factor := self._factor()) != 1.0:
            input_tensor.mul_(factor)
        self._unfinished.start(lambda: self._start(input_tensor, out=output_tensor, group=group))
        if any(
            p.grad is not None or getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters
        ):
            self._unfinished.wait()  # FSDP2 reads it at once


# Shards parameters by FSDP2.


def shard_parameters(model: nn.Module, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shards the parameters of each repeated block, and the other parameters, with FSDP2 over `mesh`. Collective.

    On a mesh with the axes `node` and `local`, parameters are sharded over `local`, with a replica per node.

    offload: whether the shards, their gradients and the optimizer state are kept in page-locked host memory, where the
    optimizer steps. Offloading was never run: see docs/gpu.md.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    blocks = repeated_blocks(model)
    for number, block in enumerate(blocks.values(), start=1):
        # Backward starts with the last block, which would be gathered again at once.
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
    """Raises UsageError if FSDP2 cannot shard the model or would train it wrongly, or if this PyTorch is too old."""
    import torch.distributed.fsdp as fsdp

    # The newest FSDP2 method that is used here.
    if not hasattr(getattr(fsdp, "FSDPModule", None), "reset_iter_state"):
        raise UsageError(
            f"FSDP2 of PyTorch {torch.__version__} is too old to shard parameters: it has no reset_iter_state. "
            "Use PyTorch 2.13 or newer, or shard = 'gradients'"
        )
    if getattr(model.forward, "__func__", None) is nn.Module.forward:  # a ModuleList
        raise UsageError(
            f"{type(model).__name__} has no forward method, in which FSDP2 would gather its parameters: pass a "
            "module whose forward calls its parts, or shard each part separately, with one updater per part"
        )
    blocks = repeated_blocks(model)
    for known, name in tied_across(model, blocks):
        raise UsageError(
            f"{known} and {name} share one tensor but belong to different blocks, which are sharded separately: "
            "untie them, or leave shard = 'parameters' out"
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
    """Raises UsageError if the trained parameters within a block, or those outside all blocks, differ in dtype."""
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
                f"{other} is {dtype} and {name} {parameter.dtype}, both {where}, whose gradients are summed "
                "together: give them the same dtype, or leave shard = 'parameters' out"
            )


def check_dense(model: nn.Module) -> None:
    """Raises UsageError for a module that makes sparse gradients."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise UsageError(
                f"{name} makes sparse gradients, which cannot be sharded: make it with sparse=False"
            )
