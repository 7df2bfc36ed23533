"""Horovod's operations that return a handle. All are collective over the process set.

Tensors may have any memory layout. Operations that only move data accept any dtype. Tensors on a GPU are copied to host
memory and back. All ranks of a process set must call the operations over that set in the same order; the names of the
operations are compared between the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hpctrain import distributed
from hpctrain.distributed import CollectiveWork
from hpctrain.errors import UsageError
from hpctrain.hvd.errors import HorovodValueError
from hpctrain.hvd.group import Group, Handle, dtype_name_of, join_all, reduction_of_zeros, titled
from hpctrain.hvd.reductions import JOINABLE, Average, HorovodOp, Sum, chosen_op, scale
from hpctrain.hvd.running import ProcessSet, global_process_set, gradient_group_of, group_of
from hpctrain.storage import split_evenly

# Shapes of more tensors are shown as a number and a checksum.
_SHAPES_SHOWN = 4


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and waits until all ranks have called `join`.

    Collective over all ranks.

    While this rank waits, it contributes zeros to the all-reduces of the other ranks. Averages are still divided by the
    number of all ranks. The other ranks may call only all-reduces of dense tensors (sum, average, Adasum) over all
    ranks, as DistributedOptimizer does.

    Args:
        device: Not used.

    Returns:
        The rank that joined last.
    """
    return join_all([group_of(global_process_set), gradient_group_of(global_process_set)])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the process set have called this function."""
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
    """Starts an all-reduce into a new tensor. Collective over the process set.

    Args:
        tensor: A dense tensor, of the same shape and dtype on all ranks.
        average: The older form of `op`. True: Average, False: Sum.
        name: The name of the operation, the same on all ranks; None: no name.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: The factor by which the tensor is multiplied before the reduction.
        postscale_factor: The factor by which the result is multiplied.
        process_set: The ranks that take part.

    Returns:
        A handle. `synchronize(handle)` returns the reduced tensor.

    Raises:
        HorovodValueError: If an argument is invalid, or an operation of this name is still pending.
        HorovodInternalError: On every rank, here or in `synchronize`, if ranks call different operations.
    """
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
    """Starts an all-reduce that overwrites `tensor`. Arguments and errors as in `allreduce_async`."""
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
    """Starts an all-reduce of several tensors together; `synchronize` returns a list of new tensors.

    The other arguments and errors are those of `allreduce_async`.
    """
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
    """Starts an all-reduce of several tensors together, in place. Arguments as in `grouped_allreduce_async`."""
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
    op: HorovodOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    behind: bool = True,
) -> CollectiveWork:
    """Starts an all-reduce of dense tensors, in place. Tensors of the same dtype and device are sent as one buffer.

    behind: True: the function returns at once. False: the operation has ended when the function returns.
    """
    _check_dense(tensors, titled("allreduce", name))
    alike: dict[tuple[str, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((dtype_name_of(tensor), tensor.device), []).append(tensor)
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


def described(op: HorovodOp, prescale: float, postscale: float) -> str:
    """Returns a reduction operation and its factors as text, which is compared between the ranks."""
    factors = "" if prescale == postscale == 1.0 else f", factors {prescale:g} before and {postscale:g} after"
    return f"{op}{factors}"


def reduce_scaled(
    group: Group,
    flat: torch.Tensor,
    *,
    op: HorovodOp,
    sizes: Sequence[int],
    prescale: float,
    postscale: float,
) -> None:
    """Multiplies `flat` by `prescale`, reduces it over the ranks and multiplies it by `postscale`, in place.

    Call it only inside an operation of `group.run`.

    sizes: the number of elements of each tensor in `flat`.
    """
    scale(flat, prescale)
    group.reduce(flat, op=op, sizes=sizes)
    scale(flat, postscale)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Handle:
    """Starts the sum or average of a sparse tensor over the ranks. Collective over the process set.

    Args:
        tensor: A sparse COO tensor. The number of entries may differ between ranks.
        name: The name of the operation, the same on all ranks; None: no name.
        op: Average or Sum.
        process_set: The ranks that take part.

    Returns:
        A handle. `synchronize(handle)` returns a new coalesced tensor.

    Raises:
        HorovodValueError: For another `op`.
    """
    group, chosen = group_of(process_set), chosen_op(op, None)
    if chosen not in (Sum, Average):
        raise HorovodValueError(f"a sparse tensor cannot be reduced by {chosen}: use hvd.Sum or hvd.Average")
    results: list[torch.Tensor] = []

    def reduce() -> None:
        results.append(sparse_sum(group, tensor.detach(), op=chosen))

    shapes = f"{dtype_name_of(tensor)} {tuple(tensor.shape)}"
    what = f"{titled('sparse_allreduce', name)} {shapes} {chosen}"
    work = group.run(what, reduce, behind=True, named=_named("sparse_allreduce", name))
    return Handle(work, lambda: results[0])


def sparse_sum(group: Group, tensor: torch.Tensor, *, op: HorovodOp) -> torch.Tensor:
    """Returns the sum or average of a sparse tensor over the ranks. Call it only inside an operation of `group.run`."""
    return distributed.all_reduce_sparse(group.comm, tensor, op="mean" if op is Average else "sum")


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts a reduction of which each rank gets a part of the rows. Collective over the process set.

    The rows (dimension 0) are divided evenly among the ranks. A remainder is given to the first ranks, one row each.

    Args:
        tensor: A tensor with at least one dimension, of the same shape and dtype on all ranks.
        name: The name of the operation, the same on all ranks; None: no name.
        op: Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: The factor by which the tensor is multiplied before the reduction.
        postscale_factor: The factor by which the result is multiplied.

    Returns:
        A handle. `synchronize(handle)` returns this rank's rows as a new tensor.

    Raises:
        HorovodValueError: For another `op`, or a tensor without dimensions.
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
    """Starts `reducescatter_async` of several tensors together; `synchronize` returns a list of new tensors."""
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
    op: HorovodOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle:
    """Starts a reduction of tensors of which each rank keeps some rows.

    rows: for each tensor, the number of rows that each rank keeps.
    """
    if op not in (Average, Sum):
        raise HorovodValueError(
            f"{titled('reducescatter', name)}: it supports hvd.Sum and hvd.Average, not {op}"
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
    """Starts concatenating the tensors of all ranks along dimension 0. Collective over the process set.

    Args:
        tensor: A tensor with at least one dimension. The size of dimension 0 may differ between ranks; the other sizes
            and the dtype must be equal.
        name: The name of the operation, the same on all ranks; None: no name.
        process_set: The ranks that take part.

    Returns:
        A handle. `synchronize(handle)` returns the concatenation as a new tensor.
    """
    return _first_of(grouped_allgather_async([tensor], name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Starts `allgather_async` of several tensors together; `synchronize` returns a list of new tensors."""
    handle = all_gather_rows(tensors, name=name, process_set=process_set)
    return Handle(handle.work, lambda: [whole for whole, _ in handle()])


def all_gather_rows(tensors: Sequence[torch.Tensor], *, name: str | None, process_set: ProcessSet) -> Handle:
    """Starts gathering tensors. The result is a list of pairs (whole tensor, number of rows from each rank)."""
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
    """Starts copying one rank's tensor to all ranks, into a new tensor. Collective over the process set.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks.
        root_rank: The world rank whose tensor is sent.
        name: The name of the operation, the same on all ranks; None: no name.
        process_set: The ranks that take part.

    Returns:
        A handle. `synchronize(handle)` returns the new tensor.

    Raises:
        HorovodValueError: If `root_rank` is not in the process set.
    """
    output = tensor.detach().clone(memory_format=torch.contiguous_format)
    return broadcast_async_(output, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts copying one rank's tensor to all ranks, overwriting `tensor`. Arguments as in `broadcast_async`."""
    group = group_of(process_set)
    if root_rank not in process_set.ranks:
        raise HorovodValueError(f"broadcast: root_rank is {root_rank}, which is not in {process_set}")

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
    """Starts sending each rank its share of this rank's rows. Collective over the process set.

    Args:
        tensor: A tensor with at least one dimension. The size of dimension 0 may differ between ranks.
        splits: The number of rows for each rank, by rank; None for equal shares.
        name: The name of the operation, the same on all ranks; None: no name.
        process_set: The ranks that take part.

    Returns:
        A handle. `synchronize(handle)` returns the received rows in the order of the ranks, and the number of rows from
            each rank, in the dtype of `splits` or int32.

    Raises:
        HorovodValueError: If `splits` are not integers that add up to the number of rows, or if `splits` is None and
            the rows cannot be divided into equal shares.
    """
    group = group_of(process_set)
    rows, size = _rows_of(tensor, "alltoall"), group.num_ranks
    if splits is None and rows % size:
        raise HorovodValueError(
            f"alltoall of {rows} rows to {size} ranks: the rows cannot be divided into equal shares, give splits"
        )
    if splits is not None and torch.as_tensor(splits).dtype.is_floating_point and len(splits):
        raise HorovodValueError(f"alltoall: splits must be integers, not {torch.as_tensor(splits).dtype}")
    sent = [rows // size] * size if splits is None else torch.as_tensor(splits).tolist()
    if len(sent) != size or sum(sent) != rows or min(sent) < 0:
        raise HorovodValueError(
            f"alltoall of {rows} rows to {size} ranks: splits must be {size} numbers of 0 or more that add up to "
            f"{rows}, not {sent}"
        )
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
        raise HorovodValueError(
            f"{operation} was given a tensor without dimensions: give a tensor with at least one dimension"
        )
    return tensor.shape[0]


def _width(tensor: torch.Tensor) -> int:
    """Returns the number of elements per row."""
    return int(torch.Size(tensor.shape[1:]).numel())


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    each = [f"{dtype_name_of(tensor)} {tuple(tensor.shape)}" for tensor in tensors]
    if len(each) <= _SHAPES_SHOWN:
        return ", ".join(each)
    mark = hashlib.blake2b(repr(each).encode(), digest_size=4).hexdigest()
    return f"{len(each)} tensors of {sum(tensor.numel() for tensor in tensors)} elements (shapes {mark})"
