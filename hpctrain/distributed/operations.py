"""Operations of torch.distributed on flat tensors, built from the few operations of a communicator.

All are collective, except the checks. A communicator sums and takes maxima of some dtypes (`Collective`). Here, a
minimum is a maximum of negated values, and narrow integers are reduced as wider integers. For products and bitwise
operations each rank gathers the parts of all ranks and combines them in rank order, so that the result is the same
everywhere. Data that is only moved is sent as bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hpctrain.comm import Collective, ReduceOp
from hpctrain.errors import BufferMismatch, UsageError
from hpctrain.storage import split_evenly

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)
_WIDER = {
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
# Dtypes whose sums may overflow although the mean does not, with the dtype in which the mean is computed.
_OF_MEANS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.uint8: torch.int32,
    torch.int32: torch.int64,
}
_HALF = (torch.float16, torch.bfloat16)
_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "maximum",
    dist.ReduceOp.MIN: "minimum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "exclusive or",
}
_FROM_ALL_PARTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "exclusive or": torch.bitwise_xor,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}
# Elements that are gathered from each rank at a time: bounds the memory to this number times the number of ranks.
_GATHERED_ELEMS = 1 << 20


def op_name(op: object) -> str:
    """Returns the name of a `torch.distributed.ReduceOp`. Raises UsageError for an unsupported operation."""
    for known, name in _NAMES.items():
        if op == known:
            return name
    raise UsageError(
        f"{op} is not supported on the process group of hpctrain: use one of {', '.join(str(k) for k in _NAMES)}"
    )


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor of shape (n,) as uint8, shape (n * itemsize,)."""
    # One element counts as contiguous whatever its stride, but a view of another size needs stride 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def all_reduce(
    comm: Collective,
    flat: torch.Tensor,
    *,
    op: str,
    sums: Callable[[torch.Tensor], None] | None = None,
) -> None:
    """Reduces `flat`, contiguous, shape (n,), over the ranks in place. Collective.

    A mean of float16 or bfloat16 is computed in float32 and rounded once.

    op: the name of the reduction, from `op_name`.
    sums: a function that sums over the ranks in place, used instead of `comm.all_reduce`. With `sums`, a mean of
    float16 or bfloat16 is also sent as float32.
    """
    if op in ("product", "and", "or", "exclusive or"):
        _from_all_parts(comm, flat, op=op)
        return
    if op == "mean" and flat.dtype in _HALF and sums is None:
        counts = split_evenly(flat.numel(), num_parts=comm.num_ranks)
        all_gather(comm, _mean_of_halves(comm, flat, counts=counts), counts=counts, out=flat)
        return
    wide = flat.to(_wide_dtype(flat.dtype, op=op))
    if op in ("sum", "mean"):
        (sums or comm.all_reduce)(wide)
    elif op == "maximum":
        comm.all_reduce(wide, op=ReduceOp.MAX)
    else:
        # Exact: the negative of a float, and the complement of an integer, which has no overflow.
        wide = _reversed(wide)
        comm.all_reduce(wide, op=ReduceOp.MAX)
        wide = _reversed(wide)
    if op == "mean":
        _divide(wide, comm.num_ranks)
    if wide.data_ptr() != flat.data_ptr():
        flat.copy_(wide)


def reduce_scatter(comm: Collective, whole: torch.Tensor, *, counts: Sequence[int], op: str) -> torch.Tensor:
    """Returns this rank's part of the reduction of `whole`. Collective.

    `whole` has the shape (sum(counts),), and the returned part has the shape (counts[rank],).
    """
    if op == "mean" and whole.dtype in _HALF:
        return _mean_of_halves(comm, whole, counts=counts)
    if op in ("sum", "mean"):
        part = comm.reduce_scatter(whole.to(_wide_dtype(whole.dtype, op=op)), counts=counts)
        if op == "mean":
            _divide(part, comm.num_ranks)
        return part.to(whole.dtype)
    mine = counts[comm.rank]
    received = exchange(comm, whole, send_counts=counts, receive_counts=[mine] * comm.num_ranks)
    return functools.reduce(_FROM_ALL_PARTS[op], received.view(comm.num_ranks, mine).unbind())


def _mean_of_halves(comm: Collective, whole: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
    """Returns this rank's part of the mean of `whole`, float16 or bfloat16. The sum is in float32, in rank order.

    Sends as many bytes as a sum, since the slices are sent in the dtype of `whole`.
    """
    mine = counts[comm.rank]
    received = exchange(comm, whole, send_counts=counts, receive_counts=[mine] * comm.num_ranks)
    total = torch.zeros(mine)
    for part in received.view(comm.num_ranks, mine):
        total += part
    return total.div_(comm.num_ranks).to(whole.dtype)


def all_gather(
    comm: Collective, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the parts of all ranks, each of shape (counts[rank],), as one tensor of shape (sum(counts),). Collective.

    out: the tensor that receives the result; None for a new tensor. `part` may be this rank's slice of `out`.
    """
    size = part.element_size()
    if out is not None and _shares_memory(part, out):
        place = out.data_ptr() + size * sum(counts[: comm.rank])
        part = part if part.data_ptr() == place else part.clone()
    given = None if out is None else as_bytes(out)
    return comm.all_gather(as_bytes(part), counts=[size * count for count in counts], out=given).view(
        part.dtype
    )


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def exchange(
    comm: Collective, flat: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> torch.Tensor:
    """Sends each rank its slice of `flat`, shape (sum(send_counts),). Collective.

    Returns the slices that this rank received, in rank order, as one tensor of shape (sum(receive_counts),).
    """
    size = flat.element_size()
    received = comm.all_to_all(
        as_bytes(flat),
        send_counts=[size * count for count in send_counts],
        receive_counts=[size * count for count in receive_counts],
    )
    return received.view(flat.dtype)


def elements_of_ranks(tensor: torch.Tensor, rows: Sequence[int], *, num_ranks: int) -> list[int]:
    """Returns how many elements of `tensor` belong to each rank. Does not communicate.

    rows: for each rank, the number of rows along dimension 0; empty for equal shares.

    Raises BufferMismatch if `rows` do not add up to the number of rows of the tensor, or if the tensor cannot be
    divided into equal shares.
    """
    if not rows:
        if tensor.shape[0] % num_ranks:
            raise BufferMismatch(
                f"all_to_all over {num_ranks} ranks: the tensor's {tensor.shape[0]} rows cannot be divided into equal "
                "shares: give the sizes"
            )
        rows = [tensor.shape[0] // num_ranks] * num_ranks
    if sum(rows) != tensor.shape[0]:
        raise BufferMismatch(
            f"all_to_all: the sizes {list(rows)} add up to {sum(rows)}, but the tensor has {tensor.shape[0]} rows"
        )
    per_row = tensor[0].numel() if tensor.shape[0] else 0
    return [count * per_row for count in rows]


def check_sizes(found: int, wanted: int, *, operation: str, num_ranks: int) -> None:
    """Raises BufferMismatch unless `found` and `wanted`, the numbers of elements of two tensors, are equal.

    Does not communicate.
    """
    if found != wanted:
        raise BufferMismatch(
            f"{operation} over {num_ranks} ranks: the parts of all ranks must have as many elements as the whole "
            f"tensor, but the numbers are {found} and {wanted}"
        )


def all_reduce_sparse(comm: Collective, tensor: torch.Tensor, *, op: str) -> torch.Tensor:
    """Returns the sum or mean of a sparse COO tensor over the ranks, coalesced. Collective.

    The result has the same shape and dtype. Each rank receives the indices and values of all ranks.
    """
    if op not in ("sum", "mean"):
        raise UsageError(f"a sparse tensor can be summed over the ranks, not reduced to their {op}")
    mine = tensor.coalesce()
    indices, values = mine.indices(), mine.values()
    entries = all_gather(comm, torch.tensor([values.shape[0]]), counts=[1] * comm.num_ranks).tolist()
    depth = indices.shape[0]
    # Entry by entry, so that the parts of the ranks follow each other.
    gathered = all_gather(
        comm, indices.t().contiguous().view(-1), counts=[depth * count for count in entries]
    )
    width = values[0].numel() if len(values) else int(torch.tensor(values.shape[1:]).prod())
    all_values = all_gather(comm, values.contiguous().view(-1), counts=[width * count for count in entries])
    if op == "mean":
        all_values = all_values.to(_OF_MEANS.get(values.dtype, values.dtype))
    total = torch.sparse_coo_tensor(
        gathered.view(-1, depth).t(),
        all_values.view(-1, *values.shape[1:]),
        tensor.shape,
        check_invariants=True,
    ).coalesce()
    if op == "mean":
        _divide(total.values(), comm.num_ranks)
    return total.to(tensor.dtype)


def _from_all_parts(comm: Collective, flat: torch.Tensor, *, op: str) -> None:
    for piece in flat.split(_GATHERED_ELEMS):
        if piece.numel() == 0:
            continue
        parts = all_gather(comm, piece, counts=[piece.numel()] * comm.num_ranks)
        piece.copy_(functools.reduce(_FROM_ALL_PARTS[op], parts.view(comm.num_ranks, -1).unbind()))


def _wide_dtype(dtype: torch.dtype, *, op: str) -> torch.dtype:
    """Returns the dtype in which a communicator reduces `dtype`; for a mean, one in which the sum does not overflow."""
    if op == "mean" and dtype in _OF_MEANS:
        return _OF_MEANS[dtype]
    if dtype in _SUMMED:
        return dtype
    if dtype not in _WIDER:
        raise UsageError(
            f"{dtype} cannot be reduced over the ranks: convert to one of {[*_SUMMED, *_WIDER]} first"
        )
    return _WIDER[dtype]


def _reversed(values: torch.Tensor) -> torch.Tensor:
    return -values if values.dtype.is_floating_point else ~values


def _divide(values: torch.Tensor, divisor: int) -> None:
    if values.dtype.is_floating_point:
        values.div_(divisor)
    else:
        values.div_(divisor, rounding_mode="trunc")
