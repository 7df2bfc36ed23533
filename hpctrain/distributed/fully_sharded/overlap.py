"""Has FSDP2 communicate while the CPU computes.

On GPUs it overlaps the two by streams. CPUs have none, so each of its operations would block. Through its hooks they
are started here, and waited for where their result is needed (ADR 59).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.distributed.fully_sharded.passes import SUMMED_HERE, gradient_factor, sharded_modules
from hpctrain.errors import UsageError


class StartSum(Protocol):
    """Starts a sum over the ranks: of `values`, shape (num_ranks * n,), into this rank's part `out`, shape (n,).

    Returns the work that ends with it. group: FSDP2's, of these ranks.
    """

    def __call__(self, values: torch.Tensor, *, out: torch.Tensor, group: Any) -> dist.Work: ...


def overlap_communication(model: nn.Module, blocks: Mapping[str, nn.Module], *, num_axes: int) -> None:
    """Has each block's parameters gathered while its neighbour computes, and its gradients summed while backward of the
    block before it runs. Not collective.

    model: sharded by `fully_shard`. blocks: in the order in which forward runs them; one that runs out of order is
    gathered when it is needed. Shards within a node, on a mesh of two axes, are still summed while backward waits: the
    sum between the nodes follows at once. Memory: of one more block its parameters, or its gradients as they are sent.
    """
    gather = _Gather()
    modules: list[Any] = [model, *blocks.values()]
    for module in modules:
        module.set_custom_all_gather(gather)
    _gather_ahead(modules)
    if num_axes == 1:
        sum_gradients_by(start_group_sum, model)


def _gather_ahead(modules: Sequence[Any]) -> None:
    """Has each of `modules`, the model and its blocks, gather the next one's parameters before its own forward.

    What was gathered for a block that did not run is dropped at the end of the model's forward: parameters may be
    loaded before the next one.
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
    """Has the gradients of each group of parameters of `model`, sharded by `fully_shard`, summed by `start`.

    Not collective. model: sharded over one axis of ranks. The sums have ended when backward has, and at most one runs
    at a time. Backward waits for a sum that is added to a gradient, or that a hook of the parameter takes.
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
    """The `StartSum` of the group itself. Collective."""
    work = dist.reduce_scatter_single(out, values, group=group, op=dist.ReduceOp.SUM, async_op=True)
    assert work is not None
    return work


class _Allocating:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _Gather(_Allocating):
    """What FSDP2 calls to gather the parameters of a group; its `AllGather`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Starts gathering; FSDP2 waits for the work before it uses the parameters. Collective."""
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)


@final
class _Unfinished:
    """The sum that backward has started and not waited for: at most one of a model."""

    def __init__(self) -> None:
        self._work: dist.Work | None = None

    def start(self, begin: Callable[[], dist.Work]) -> None:
        """Waits for the sum before, and starts another, which ends before the backward that runs now."""
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
    """What FSDP2 calls with the gradients of a group of parameters; its `ReduceScatter`.

    parameters: of the group, as they are sharded. factor: returns by what gradients are multiplied before they are
    summed; not after, as FSDP2 would do at once, when the sum has not ended.
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
            raise UsageError(f"FSDP2 asks for {op}: gradients of this model are summed, set no divide factor")
        if (factor := self._factor()) != 1.0:
            input_tensor.mul_(factor)
        self._unfinished.start(lambda: self._start(input_tensor, out=output_tensor, group=group))
        if any(
            p.grad is not None or getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters
        ):
            self._unfinished.wait()  # FSDP2 reads it at once
