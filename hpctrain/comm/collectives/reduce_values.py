"""Sums, means and maxima of measured values over the ranks: tensors, or numbers by name. For small data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, overload

import torch

from hpctrain.comm.collectives.agreement import all_gather_json, check_same, check_same_buffer
from hpctrain.comm.interface.buffer_checks import HALF_TYPES
from hpctrain.comm.interface.communicator import Collective, ReduceOp
from hpctrain.errors import BufferMismatch, UsageError

Operation = Literal["sum", "mean", "max"]


@overload
def all_reduce_values(comm: Collective, value: torch.Tensor, *, op: Operation = "sum") -> torch.Tensor: ...
@overload
def all_reduce_values(
    comm: Collective, value: Mapping[str, float], *, op: Operation = "sum"
) -> dict[str, float]: ...
def all_reduce_values(
    comm: Collective, value: torch.Tensor | Mapping[str, float], *, op: Operation = "sum"
) -> torch.Tensor | dict[str, float]:
    """Returns the sum, mean or maximum over the ranks, equal on every rank; `value` is unchanged. Collective.

    value: a tensor of any shape, with the same number of elements and dtype on all ranks (returns a new tensor of the
    same shape and dtype), or numbers under the same names on all ranks, which are added in rank order in float64. A
    mean weights all ranks equally: for parts of unequal size sum the totals and the counts, and divide. Half types are
    summed in float32. A maximum of numbers is NaN if one is. Raises BufferMismatch on every rank, naming the ranks,
    where names, lengths or dtypes differ; UsageError for any other `op`, and for the mean of an integer tensor.
    """
    if op not in ("sum", "mean", "max"):
        raise UsageError(f"all_reduce with op={op!r}: choose sum, mean or max")
    if isinstance(value, torch.Tensor):
        return _tensor(comm, value, op=op)
    return _numbers(comm, value, op=op)


def _numbers(comm: Collective, value: Mapping[str, float], *, op: Operation) -> dict[str, float]:
    mine: dict[str, Any] = {name: float(number) for name, number in value.items()}
    everyones = all_gather_json(comm, mine)
    if any(theirs.keys() != everyones[0].keys() for theirs in everyones):  # on all ranks or on none
        check_same(comm, name="the names of the numbers", value=sorted(mine), error=BufferMismatch)
    return {name: _joined([theirs[name] for theirs in everyones], op=op) for name in mine}


def _joined(numbers: list[float], *, op: Operation) -> float:
    if op == "max":
        return math.nan if any(math.isnan(n) for n in numbers) else max(numbers)
    return in_order(numbers) / (len(numbers) if op == "mean" else 1)


def in_order(numbers: Iterable[float]) -> float:
    """Returns the sum of `numbers`, added one by one in their order.

    The builtin `sum` compensates rounding errors since Python 3.12, so its last bit depends on the Python version.
    """
    total = 0.0
    for number in numbers:
        total += number
    return total


def _tensor(comm: Collective, value: torch.Tensor, *, op: Operation) -> torch.Tensor:
    if op == "mean" and not value.dtype.is_floating_point:
        raise UsageError(f"all_reduce cannot take the mean of {value.dtype}: pass value.double()")
    wide = torch.float32 if value.dtype in HALF_TYPES else value.dtype
    buffer = value.detach().to(wide, copy=True).contiguous().view(-1)
    check_same_buffer(comm, buffer, name="the tensor to reduce")
    comm.all_reduce(buffer, op=ReduceOp.MAX if op == "max" else ReduceOp.SUM)
    if op == "mean":
        buffer /= comm.num_ranks
    return buffer.view(value.shape).to(value.dtype)
