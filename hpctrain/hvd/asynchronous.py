"""Horovod's operations that return a handle. Collective over the process set.

Tensors may have any layout in memory, and those that are not reduced any dtype. On a GPU they are copied to host memory
and back. Names: the ranks must call operations of a process set in the same order; a name is part of what is
compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hpctrain import distributed
from hpctrain.distributed import CollectiveWork
from hpctrain.errors import UsageError
from hpctrain.hvd.errors import HorovodValueError
from hpctrain.hvd.group import Group, Handle, dtype_name, join_all, reduction_of_zeros, titled
from hpctrain.hvd.reductions import JOINABLE, Average, ReduceOp, Sum, chosen_op, scale
from hpctrain.hvd.running import ProcessSet, global_process_set, gradient_group_of, group_of
from hpctrain.storage import split_evenly

# Shapes of more tensors are shown as a number and a checksum.
_SHAPES_SHOWN = 4


def join(device: int = -1) -> int:
    """Says that this rank has no more data: until all ranks have joined it adds zeros to the all-reduces of the others.

    Returns the rank that joined last. device: not used. Averages still divide by the number of all ranks. The
    others may call all-reduces of dense tensors (sum, average, Adasum) over all ranks, as DistributedOptimizer does.
    """
    return join_all([group_of(global_process_set), gradient_group_of(global_process_set)])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of the process set have called it."""
    group_of(process_set).run("barrier", lambda: None, behind=False)


# ---------------------------------------------------------------------- reductions


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts reducing a tensor of the same shape and dtype on all ranks; the result is a new tensor."""
    handle = grouped_allreduce_async(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set
    )
    return _first_of(handle)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async`, in place."""
    handle = grouped_allreduce_async_(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set
    )
    return _first_of(handle)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts reducing several tensors at once; the result is a list of new tensors."""
    _check_dense(tensors, "allreduce")
    outputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return grouped_allreduce_async_(
        outputs, average, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `grouped_allreduce_async`, in place."""
    group = group_of(process_set)
    work = start_all_reduce(
        group, [tensor.detach() for tensor in tensors], name=name,
        op=chosen_op(op, average), prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip
    return Handle(work, lambda: list(tensors))


def start_all_reduce(
    group: Group,
    tensors: Sequence[torch.Tensor],
    *,
    name: str | None,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    behind: bool = True,
) -> CollectiveWork:
    """Starts reducing dense tensors in place; those of one dtype and device as one buffer."""
    _check_dense(tensors, titled("allreduce", name))
    alike: dict[tuple[str, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((dtype_name(tensor), tensor.device), []).append(tensor)
    buffers = [(kind, [tensor.numel() for tensor in members]) for (kind, _), members in alike.items()]

    def reduce() -> None:
        for members, (_, sizes) in zip(alike.values(), buffers, strict=True):
            single = len(members) == 1 and members[0].is_contiguous()
            flat = members[0].view(-1) if single else torch.cat([member.reshape(-1) for member in members])
            reduce_scaled(group, flat, op=op, sizes=sizes, prescale=prescale, postscale=postscale)
            if not single:
                for member, part in zip(members, flat.split(sizes), strict=True):
                    member.copy_(part.view(member.shape))

    what = f"{titled('allreduce', name)} {_shapes(tensors)} {described(op, prescale, postscale)}"
    zeros = reduction_of_zeros(op, buffers) if op in JOINABLE else None
    return group.run(what, reduce, behind=behind, zeros=zeros, named=_named("allreduce", name))


def described(op: ReduceOp, prescale: float, postscale: float) -> str:
    """Returns an operation and its factors as a text, for the comparison of what the ranks call."""
    factors = "" if prescale == postscale == 1.0 else f", factors {prescale:g} before and {postscale:g} after"
    return f"{op}{factors}"


def reduce_scaled(
    group: Group, flat: torch.Tensor, *, op: ReduceOp, sizes: Sequence[int], prescale: float, postscale: float
) -> None:
    """Reduces `flat` in place, multiplied by the factors before and after; within an operation of `group`."""
    scale(flat, prescale)
    group.reduce(flat, op=op, sizes=sizes)
    scale(flat, postscale)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Handle:
    """Starts the sum or average of a sparse COO tensor; the result is a new one, coalesced."""
    group, chosen = group_of(process_set), chosen_op(op, None)
    if chosen not in (Sum, Average):
        raise HorovodValueError(f"a sparse tensor can be summed or averaged, not reduced by {chosen}")
    results: list[torch.Tensor] = []

    def reduce() -> None:
        results.append(sparse_sum(group, tensor.detach(), op=chosen))

    shapes = f"{dtype_name(tensor)} {tuple(tensor.shape)}"
    what = f"{titled('sparse_allreduce', name)} {shapes} {chosen}"
    work = group.run(what, reduce, behind=True, named=_named("sparse_allreduce", name))
    return Handle(work, lambda: results[0])


def sparse_sum(group: Group, tensor: torch.Tensor, *, op: ReduceOp) -> torch.Tensor:
    """Returns the sum or average over the ranks of a sparse tensor; within an operation of `group`."""
    return distributed.all_reduce_sparse(group.comm, tensor, op="mean" if op is Average else "sum")


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts reducing a tensor of the same shape and dtype on all ranks; the result is this rank's rows of it.

    The rows, along dimension 0, are divided evenly, the first ranks getting one more where they do not divide.
    """
    handle = grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor)
    return _first_of(handle)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `reducescatter_async` for several tensors at once; the result is a list."""
    group = group_of(process_set)
    rows = [split_evenly(_rows_of(tensor, "reducescatter"), num_parts=group.num_ranks) for tensor in tensors]
    return reduce_scatter_rows(
        group, tensors, rows=rows, name=name, op=chosen_op(op, None),
        prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip


def reduce_scatter_rows(
    group: Group,
    tensors: Sequence[torch.Tensor],
    *,
    rows: Sequence[Sequence[int]],
    name: str | None,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle:
    """Starts reducing tensors, of which each rank keeps its rows. rows: of each tensor, how many each rank keeps."""
    if op not in (Average, Sum):
        raise HorovodValueError(
            f"{titled('reducescatter', name)}: it sums or averages, and does not reduce by {op}"
        )
    wholes = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    results: list[torch.Tensor] = []

    def reduce() -> None:
        for whole, of_ranks in zip(wholes, rows, strict=True):
            width = _width(whole)
            flat = whole.view(-1)
            scale(flat, prescale)
            part = distributed.reduce_scatter(
                group.comm, flat, counts=[count * width for count in of_ranks],
                op="mean" if op is Average else "sum",
            )  # fmt: skip
            scale(part, postscale)
            results.append(part.view(of_ranks[group.rank], *whole.shape[1:]))

    what = f"{titled('reducescatter', name)} {_shapes(tensors)} {described(op, prescale, postscale)}"
    return Handle(group.run(what, reduce, behind=True, named=_named("reducescatter", name)), lambda: results)


# ---------------------------------------------------------------------- gathering and distributing


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Starts concatenating the ranks' tensors along dimension 0, which may differ; the result is a new tensor."""
    return _first_of(grouped_allgather_async([tensor], name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As `allgather_async` for several tensors at once; the result is a list."""
    handle = all_gather_rows(tensors, name=name, process_set=process_set)
    return Handle(handle.work, lambda: [whole for whole, _ in handle()])


def all_gather_rows(tensors: Sequence[torch.Tensor], *, name: str | None, process_set: ProcessSet) -> Handle:
    """Starts gathering tensors; the result is a list of (whole tensor, rows of each rank)."""
    group = group_of(process_set)
    mine = [_rows_of(tensor, "allgather") for tensor in tensors]
    parts = [tensor.detach().contiguous() for tensor in tensors]
    results: list[tuple[torch.Tensor, list[int]]] = []

    def gather() -> None:
        counts = [len(parts)] * group.num_ranks
        rows = distributed.all_gather(group.comm, torch.tensor(mine), counts=counts).view(group.num_ranks, -1)
        for part, of_ranks in zip(parts, rows.t().tolist(), strict=True):
            width = _width(part)
            whole = distributed.all_gather(
                group.comm, part.view(-1), counts=[count * width for count in of_ranks]
            )
            results.append((whole.view(sum(of_ranks), *part.shape[1:]), of_ranks))

    shapes = _shapes([part[:0] for part in parts])
    what = f"{titled('allgather', name)} {shapes}"
    return Handle(group.run(what, gather, behind=True, named=_named("allgather", name)), lambda: results)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts sending a tensor of rank `root_rank` (its world rank) to all; the result is a new tensor."""
    output = tensor.detach().clone(memory_format=torch.contiguous_format)
    return broadcast_async_(output, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `broadcast_async`, in place."""
    group = group_of(process_set)
    if root_rank not in process_set.ranks:
        raise HorovodValueError(f"broadcast from rank {root_rank}, which is not in {process_set}")

    def send() -> None:
        flat = tensor.detach().contiguous().view(-1)
        group.comm.broadcast(distributed.as_bytes(flat), root=group.place_of(root_rank))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    what = f"{titled('broadcast', name)} {_shapes([tensor])} from rank {root_rank}"
    return Handle(group.run(what, send, behind=True, named=_named("broadcast", name)), lambda: tensor)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts sending each rank its rows of a tensor, whose dimension 0 may differ between ranks.

    splits: rows for each rank, in their order; None: equally many. The result is a tuple: the rows that the ranks
    sent, in their order, and how many each of them sent, in the dtype of `splits`, or int32.
    """
    group = group_of(process_set)
    rows, size = _rows_of(tensor, "alltoall"), group.num_ranks
    if splits is None and rows % size:
        raise HorovodValueError(f"alltoall of {rows} rows to {size} ranks: give splits")
    if splits is not None and torch.as_tensor(splits).dtype.is_floating_point and len(splits):
        raise HorovodValueError(f"alltoall: splits are whole numbers, not {torch.as_tensor(splits).dtype}")
    sent = [rows // size] * size if splits is None else torch.as_tensor(splits).tolist()
    if len(sent) != size or sum(sent) != rows or min(sent) < 0:
        raise HorovodValueError(f"alltoall of {rows} rows to {size} ranks cannot have the splits {sent}")
    part = tensor.detach().contiguous()
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
    results: list[torch.Tensor] = []

    def exchange() -> None:
        ones, width = [1] * size, _width(part)
        received = distributed.exchange(group.comm, torch.tensor(sent), send_counts=ones, receive_counts=ones)
        whole = distributed.exchange(
            group.comm,
            part.view(-1),
            send_counts=[count * width for count in sent],
            receive_counts=[count * width for count in received.tolist()],
        )
        results.extend([whole.view(int(received.sum()), *part.shape[1:]), received.to(like)])

    what = f"{titled('alltoall', name)} {_shapes([part[:0]])}"
    work = group.run(what, exchange, behind=True, named=_named("alltoall", name))
    return Handle(work, lambda: tuple(results))


# ---------------------------------------------------------------------- details


def _first_of(handle: Handle) -> Handle:
    return Handle(handle.work, lambda: handle()[0])


def _named(operation: str, name: str | None) -> str | None:
    return None if name is None else titled(operation, name)


def _check_dense(tensors: Sequence[torch.Tensor], operation: str) -> None:
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise UsageError(f"{operation} of a sparse tensor: use hvd.sparse_allreduce_async")


def _rows_of(tensor: torch.Tensor, operation: str) -> int:
    if tensor.dim() == 0:
        raise HorovodValueError(f"{operation} needs a tensor with a first dimension, not a number")
    return tensor.shape[0]


def _width(tensor: torch.Tensor) -> int:
    """Returns the number of elements of a row."""
    return int(torch.Size(tensor.shape[1:]).numel())


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    each = [f"{dtype_name(tensor)} {tuple(tensor.shape)}" for tensor in tensors]
    if len(each) <= _SHAPES_SHOWN:
        return ", ".join(each)
    mark = hashlib.blake2b(repr(each).encode(), digest_size=4).hexdigest()
    return f"{len(each)} tensors of {sum(tensor.numel() for tensor in tensors)} elements (shapes {mark})"
