"""Transfers of tensors and numbers between ranks: broadcasts, sums of measured values, messages between two ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch

from hpctrain.comm.collectives.agreement import all_gather_json, check_same, check_same_buffer
from hpctrain.comm.interface.buffer_checks import HALF_TYPES
from hpctrain.comm.interface.communicator import Collective, ReduceOp
from hpctrain.comm.interface.transport import Pending, Transport, poll_until
from hpctrain.errors import BufferMismatch, UsageError

# Above 32 MiB, so that glibc gives a message's memory back (resilience/host_memory.py).
MESSAGE_BYTES = 64 << 20


def broadcast_tensors(
    comm: Collective,
    tensors: Sequence[torch.Tensor],
    *,
    root: int = 0,
    name: str = "the tensors to broadcast",
) -> None:
    """Copies `tensors` from the group's rank `root` into the `tensors` of every other rank, in place. Collective.

    tensors: tensors of any shape and layout. They are sent as raw bytes, so dtypes that a backend cannot reduce (bool,
    bfloat16) can be copied too. Messages have up to `MESSAGE_BYTES`, and each rank holds a copy of one message at a
    time.
    name: what the tensors are, for the error message.

    Raises BufferMismatch on every rank, naming the ranks that differ, unless all ranks pass the same number of tensors
    with the same shapes and dtypes.
    """
    if comm.num_ranks == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    groups = list(by_kind.values())
    # Check before the first message: ranks with different numbers of messages would wait for each other.
    check_same(comm, name=name, value=_describe(groups), error=BufferMismatch)
    with torch.no_grad():
        for group in groups:
            for part in _messages(group):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in part]).view(torch.uint8)
                comm.broadcast(flat, root=root)
                received = flat.view(group[0].dtype)
                offset = 0
                for tensor in part:
                    tensor.copy_(received[offset : offset + tensor.numel()].view(tensor.shape))
                    offset += tensor.numel()


def _messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields lists of tensors with up to `MESSAGE_BYTES` per list; a larger tensor is in a list of its own."""
    waiting: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if waiting and num_bytes + tensor.nbytes > MESSAGE_BYTES:
            yield waiting
            waiting, num_bytes = [], 0
        waiting.append(tensor)
        num_bytes += tensor.nbytes
    yield waiting


def _describe(groups: Sequence[Sequence[torch.Tensor]]) -> str:
    """Returns a text such as `6 tensors: 540000 x float32 (shapes 26832cdb)`.

    The tensors of each group have one dtype.
    """
    shapes = repr([[tuple(tensor.shape) for tensor in group] for group in groups])
    mark = hashlib.blake2b(shapes.encode(), digest_size=4).hexdigest()
    sizes = " + ".join(
        f"{sum(tensor.numel() for tensor in group)} x {str(group[0].dtype).removeprefix('torch.')}"
        for group in groups
    )
    return f"{sum(map(len, groups))} tensors: {sizes} (shapes {mark})" if groups else "no tensors"


# Sums, means and maxima of measured values over the ranks: tensors, or numbers by name. For small data.


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
    """Returns the sum, mean or maximum of `value` over the ranks, equal on every rank. For small data. Collective.

    value: either a tensor, with the same dtype and number of elements on all ranks, or numbers by name, with the same
    names on all ranks. `value` is not changed. For a tensor, the result is a new tensor of the same shape and dtype;
    half types are summed in float32. Numbers are added in rank order in float64; the maximum is NaN if a number is NaN.
    op: reduction. A mean weights all ranks equally. If the ranks hold parts of unequal size, reduce the totals and the
    counts with `sum` instead, and divide.

    Raises BufferMismatch on every rank, naming the ranks, if names, lengths or dtypes differ; UsageError for any other
    `op`, and for the mean of an integer tensor.
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
    return sum_one_by_one(numbers) / (len(numbers) if op == "mean" else 1)


def sum_one_by_one(numbers: Iterable[float]) -> float:
    """Returns the sum of `numbers`, added one by one in their order.

    The builtin `sum` compensates rounding errors since Python 3.12, so the last bit of its result depends on the
    Python version.
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


def send_message(transport: Transport, buffer: torch.Tensor, *, to: int, what: str) -> None:
    """Sends `buffer`, shape (n,), uint8, and waits until it may be changed.

    what: name for the watchdog's messages.
    """
    _wait(transport, transport.send(buffer, to=to, tag=0), what=what)


def receive_message(transport: Transport, buffer: torch.Tensor, *, source: int, what: str) -> None:
    """Receives a message into `buffer`, shape (n,), uint8, and waits for it.

    what: name for the watchdog's messages.
    """
    _wait(transport, transport.receive(buffer, source=source, tag=0), what=what)


def _wait(transport: Transport, pending: Pending, *, what: str) -> None:
    if transport.all_done([pending]):
        return
    transport.waits(what)
    poll_until(lambda: transport.all_done([pending]))
    transport.progressed()
