"""Horovod's operations that wait for their result. All are collective over the process set.

Gradients flow through the operations that are not in place. As in Horovod, these are the gradients of a loss that is
the mean over the ranks, and backward is collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hpctrain.errors import UsageError
from hpctrain.hvd import asynchronous
from hpctrain.hvd.group import synchronize
from hpctrain.hvd.reductions import Average, Compression, Compressor, HorovodOp, Sum, chosen_op
from hpctrain.hvd.running import ProcessSet, global_process_set, group_of

Tensors = Sequence[torch.Tensor]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the all-reduce of a tensor as a new tensor. Collective; differentiable for Sum and Average.

    Args:
        tensor: A dense tensor, of the same shape and dtype on all ranks.
        average: The older form of `op`. True: Average, False: Sum.
        name: The name of the operation, the same on all ranks; None: no name.
        compression: The format in which the tensor is sent.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: The factor by which the tensor is multiplied before the reduction.
        postscale_factor: The factor by which the result is multiplied.
        process_set: The ranks that take part.

    Returns:
        The reduced tensor.

    Raises:
        HorovodValueError: If an argument is invalid.
        HorovodInternalError: On every rank, if ranks call different operations.
    """
    return grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Returns the all-reduces of several tensors, sent together, as new tensors. Arguments as in `allreduce`."""
    chosen = chosen_op(op, average)
    sent, contexts = _compressed(compression, tensors)
    reduced = _AllReduce.apply(name, chosen, prescale_factor, postscale_factor, process_set, *sent)
    return _decompressed(compression, reduced, contexts)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replaces the values of `tensor` by their all-reduce. Returns `tensor`.

    Not differentiable; arguments as in `allreduce`.
    """
    result: torch.Tensor = synchronize(
        asynchronous.allreduce_async_(
            tensor, average, name, op, prescale_factor, postscale_factor, process_set
        )
    )
    return result


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Overwrites several tensors with their all-reduces, and returns the tensors.

    Not differentiable. Arguments as in `allreduce`.
    """
    result: list[torch.Tensor] = synchronize(
        asynchronous.grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
    )
    return result


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the concatenation of all ranks' tensors along dimension 0. Collective; differentiable.

    Args:
        tensor: A tensor with at least one dimension. The size of dimension 0 may differ between ranks; the other sizes
            and the dtype must be equal.
        name: The name of the operation, the same on all ranks; None: no name.
        process_set: The ranks that take part.

    Returns:
        The concatenation, in the order of the ranks.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Returns the concatenations of several tensors, gathered together. Arguments as in `allgather`."""
    return list(_AllGather.apply(name, process_set, *tensors))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns one rank's tensor on all ranks, as a new tensor. Collective; differentiable.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks.
        root_rank: The world rank whose tensor is sent.
        name: The name of the operation, the same on all ranks; None: no name.
        process_set: The ranks that take part.

    Returns:
        The tensor of `root_rank`.

    Raises:
        HorovodValueError: If `root_rank` is not in the process set.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites `tensor` with the tensor of rank `root_rank`, and returns `tensor`.

    Not differentiable. Arguments as in `broadcast`.
    """
    result: torch.Tensor = synchronize(asynchronous.broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends each rank its share of this rank's rows, and returns the received rows. Collective; differentiable.

    Args:
        tensor: A tensor with at least one dimension. The size of dimension 0 may differ between ranks.
        splits: The number of rows for each rank, by rank; None for equal shares.
        name: The name of the operation, the same on all ranks; None: no name.
        process_set: The ranks that take part.

    Returns:
        The received rows in the order of the ranks. If `splits` is given, also the number of rows from each rank.

    Raises:
        HorovodValueError: If `splits` are not integers that add up to the number of rows, or if `splits` is None and
            the rows cannot be divided into equal shares.
    """
    received, rows = _AllToAll.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, rows)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of the reduction of a tensor. Collective; differentiable.

    The rows (dimension 0) are divided evenly among the ranks. A remainder is given to the first ranks, one row each.

    Args:
        tensor: A tensor with at least one dimension, of the same shape and dtype on all ranks.
        name: The name of the operation, the same on all ranks; None: no name.
        compression: The format in which the tensor is sent.
        op: Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: The factor by which the tensor is multiplied before the reduction.
        postscale_factor: The factor by which the result is multiplied.

    Returns:
        The rows of this rank, as a new tensor.

    Raises:
        HorovodValueError: For another `op`, or a tensor without dimensions.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Returns this rank's rows of the reductions of several tensors, sent together. Arguments as in `reducescatter`."""
    chosen = chosen_op(op, None)
    sent, contexts = _compressed(compression, tensors)
    reduced = _ReduceScatter.apply(name, chosen, process_set, prescale_factor, postscale_factor, *sent)
    return _decompressed(compression, reduced, contexts)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: HorovodOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = {
            "name": _of_gradient(name), "op": op, "prescale_factor": prescale, "postscale_factor": postscale,
            "process_set": process_set,
        }  # fmt: skip
        return tuple(
            synchronize(
                asynchronous.grouped_allreduce_async(
                    tensors, None, name, op, prescale, postscale, process_set
                )
            )
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.call["op"] not in (Sum, Average):
            raise UsageError(f"an all-reduce by {ctx.call['op']} has no gradient: use hvd.Sum or hvd.Average")
        reduced = synchronize(asynchronous.grouped_allreduce_async(gradients, **ctx.call))
        return (None,) * 5 + tuple(reduced)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found = synchronize(asynchronous.all_gather_rows(tensors, name=name, process_set=process_set))
        ctx.name, ctx.process_set, ctx.rows = name, process_set, [rows for _, rows in found]
        return tuple(whole for whole, _ in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group = group_of(ctx.process_set)
        name = _of_gradient(ctx.name or "allgather")
        parts = synchronize(
            asynchronous.reduce_scatter_rows(group, gradients, rows=ctx.rows, name=name, op=Average)
        )
        return (None, None, *parts)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        result: torch.Tensor = synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reduced = synchronize(
            asynchronous.allreduce_async(gradient, name=_of_gradient(ctx.name), process_set=ctx.process_set)
        )
        group = group_of(ctx.process_set)
        is_root = group.comm.members[group.rank] == ctx.root_rank
        return reduced if is_root else torch.zeros_like(reduced), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: torch.Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received, rows = synchronize(asynchronous.alltoall_async(tensor, splits, name, process_set))
        ctx.rows, ctx.name, ctx.process_set = rows, name, process_set
        ctx.mark_non_differentiable(rows)
        return received, rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, _ = synchronize(
            asynchronous.alltoall_async(gradient, ctx.rows, _of_gradient(ctx.name), ctx.process_set)
        )
        return own, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: HorovodOp,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        num_ranks = group_of(process_set).num_ranks
        ctx.factor = prescale * postscale * (num_ranks if op is Sum else 1)
        ctx.name, ctx.process_set = name, process_set
        return tuple(
            synchronize(
                asynchronous.grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale)
            )
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = [gradient * ctx.factor for gradient in gradients]
        wholes = synchronize(
            asynchronous.grouped_allgather_async(parts, _of_gradient(ctx.name), ctx.process_set)
        )
        return (None,) * 5 + tuple(wholes)


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"gradient of {name}"


def _compressed(compression: Compressor, tensors: Tensors) -> tuple[Tensors, Sequence[Any]]:
    if not tensors:
        return [], []
    sent, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    return sent, contexts


def _decompressed(compression: Compressor, tensors: Tensors, contexts: Sequence[Any]) -> list[torch.Tensor]:
    return [
        compression.decompress(tensor, context) for tensor, context in zip(tensors, contexts, strict=True)
    ]
