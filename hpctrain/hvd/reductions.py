"""Horovod's reductions of flat tensors over the ranks: operations and factors. Collective."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hpctrain import distributed
from hpctrain.comm import Collective
from hpctrain.hvd.errors import HorovodValueError
from hpctrain.reduce import adasum


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
