"""Horovod's reductions of flat tensors over the ranks: operations, factors and Adasum. Collective.

Source of Adasum: Maleki et al. 2020, arXiv:2006.02924.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from hpctrain import distributed
from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.hvd.errors import HorovodValueError
from hpctrain.storage import split_evenly


class HorovodOp(enum.IntEnum):
    """The operations by which an all-reduce combines tensors. The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    def __str__(self) -> str:
        return self.name.lower()


Average = HorovodOp.AVERAGE
Sum = HorovodOp.SUM
Adasum = HorovodOp.ADASUM
Min = HorovodOp.MIN
Max = HorovodOp.MAX
Product = HorovodOp.PRODUCT

# Operations to which joined ranks contribute zeros.
JOINABLE = (Average, Sum, Adasum)
_NAMES = {Average: "mean", Sum: "sum", Min: "minimum", Max: "maximum", Product: "product"}


def chosen_op(op: int | None, average: bool | None) -> HorovodOp:
    """Returns the operation that is named by `op`, or by the older argument `average`; Average if both are None.

    Raises HorovodValueError if both are given, or if `op` is not the number of an operation.
    """
    if op is not None and average is not None:
        raise HorovodValueError("an all-reduce was given op and average: give op alone")
    if average is not None:
        warnings.warn(
            "give op=hvd.Average or op=hvd.Sum instead of average", DeprecationWarning, stacklevel=3
        )
        return Average if average else Sum
    try:
        return Average if op is None else HorovodOp(op)
    except ValueError:
        raise HorovodValueError(f"op is {op!r}: give hvd.Average, Sum, Adasum, Min, Max or Product") from None


def scale(flat: torch.Tensor, factor: float) -> None:
    """Multiplies `flat` by `factor` in place; integers are rounded towards zero."""
    if factor == 1.0:
        return
    if flat.dtype.is_floating_point:
        flat.mul_(factor)
    else:
        flat.copy_(flat.double() * factor)


def reduce_flat(
    comm: Collective,
    flat: torch.Tensor,
    *,
    op: HorovodOp,
    sizes: Sequence[int],
    sums: Callable[[torch.Tensor], None] | None = None,
) -> None:
    """Reduces `flat`, shape (sum(sizes),), over the ranks in place.

    sizes: the number of elements of each tensor in `flat`, which Adasum needs.
    sums: a function that sums over the ranks in place, used instead of `comm.all_reduce`.
    """
    if op is Adasum:
        adasum(comm, flat, sizes=sizes)
    elif op is Average and sums is not None and flat.dtype in (torch.float16, torch.bfloat16):
        # Two levels would send the mean of a half type as float32. The sum may overflow, as Horovod's does.
        distributed.all_reduce(comm, flat, op="sum", sums=sums)
        flat.div_(comm.num_ranks)
    else:
        distributed.all_reduce(comm, flat, op=_NAMES[op], sums=sums)


def adasum(comm: Collective, flat: torch.Tensor, *, sizes: Sequence[int]) -> None:
    """Combines the ranks' tensors by Adasum, in place. `flat` is floating point, shape (sum(sizes),).

    Two tensors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum if they are orthogonal, their mean
    if they are equal. Ranks 0 and 1, 2 and 3, ... are combined first, then neighbouring results. If a round has an odd
    number of results, the last result waits for the next round, so that any number of ranks works.

    Each rank combines one slice of the tensors of all ranks; in each round, a small sum adds up the dot products of the
    slices. Half types are computed in float32, dot products in float64. As many bytes are sent as for a sum. Raises
    UsageError for integers.
    """
    if not flat.dtype.is_floating_point:
        raise UsageError(f"Adasum combines floating-point tensors, not {flat.dtype}")
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    counts = split_evenly(flat.numel(), num_parts=comm.num_ranks)
    mine = counts[comm.rank]
    received = distributed.exchange(comm, wide, send_counts=counts, receive_counts=[mine] * comm.num_ranks)
    parts = list(received.view(comm.num_ranks, mine).unbind())
    first = sum(counts[: comm.rank])
    lengths = _lengths_within(sizes, first=first, end=first + mine)
    while len(parts) > 1:
        pairs = list(zip(parts[::2], parts[1::2], strict=False))
        products = torch.stack([_products(a, b, lengths) for a, b in pairs])
        flat_products = products.view(-1)
        comm.all_reduce(flat_products)
        combined = [
            _combined(a, b, of_pair, lengths) for (a, b), of_pair in zip(pairs, products, strict=True)
        ]
        parts = combined + parts[2 * len(pairs) :]
    flat.copy_(distributed.all_gather(comm, parts[0].contiguous(), counts=counts))


def _lengths_within(sizes: Sequence[int], *, first: int, end: int) -> list[int]:
    """Returns how many elements of each tensor lie between the positions `first` and `end` of their concatenation."""
    offsets = list(accumulate(sizes, initial=0))
    return [max(0, min(end, after) - max(first, before)) for before, after in pairwise(offsets)]


def _products(a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Returns the dot products a.a, b.b and a.b per tensor: float64, shape (3, number of tensors)."""
    pieces = zip(a.double().split(list(lengths)), b.double().split(list(lengths)), strict=True)
    return torch.stack([torch.stack([x @ x, y @ y, x @ y]) for x, y in pieces], dim=1)


def _combined(
    a: torch.Tensor, b: torch.Tensor, products: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    of_a, of_b, of_both = products
    repeats = torch.tensor(lengths, device=a.device)

    def share(squared: torch.Tensor) -> torch.Tensor:
        factors = torch.where(squared > 0, 1 - of_both / (2 * squared), 1.0)
        return factors.repeat_interleave(repeats).to(a.dtype)

    return a * share(of_a) + b * share(of_b)


# Horovod's compressions: what a gradient is sent as.


class Compressor(Protocol):
    """The interface of a compression for DistributedOptimizer: a class or an object with these two functions."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor that is summed over the ranks, and the context that `decompress` needs."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor:
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The compressions that Horovod offers."""

    none = NoneCompressor
    fp16 = FP16Compressor
