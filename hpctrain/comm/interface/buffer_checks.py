"""Checks and transformations of buffers that several backends share. Nothing here needs a particular library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from hpctrain.comm.interface.communicator import Collective, ReduceOp
from hpctrain.errors import BufferMismatch


def gather_bytes(comm: Collective, data: bytes) -> list[bytes]:
    """Returns every rank's `data`, in rank order: gathers the lengths, then the bytes. Collective."""
    length = torch.tensor([len(data)], dtype=torch.int64)
    lengths = comm.all_gather(length, counts=[1] * comm.num_ranks).tolist()
    # frombuffer refuses an empty buffer and warns about a read-only one.
    part = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    whole = comm.all_gather(part, counts=lengths)
    return [bytes(piece.numpy()) for piece in whole.split(lengths)]


HALF_TYPES = (torch.float16, torch.bfloat16)
# Counts and displacements of MPI, and so of Horovod, are 32-bit: longer buffers are sent in chunks of this length. One
# chunk of float64 is 2 GiB.
MAX_CHUNK_ELEMS = 2**28
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Returns the offset of each part in the concatenation of all parts, followed by the total length.

    The list has one entry more than `counts`.
    """
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def check_buffer(buffer: torch.Tensor, *, operation: str, rank: int) -> None:
    """Raises BufferMismatch unless `buffer` is one-dimensional, contiguous and of one of `DTYPES`."""
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise BufferMismatch(
            f"{operation} on rank {rank} needs a contiguous one-dimensional buffer, got shape "
            f"{tuple(buffer.shape)} with strides {buffer.stride()}: pass tensor.contiguous().view(-1)"
        )
    if buffer.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise BufferMismatch(f"{operation} on rank {rank} cannot send {buffer.dtype}: use one of {known}")


def check_counts(num_elems: int, *, counts: Sequence[int], operation: str, rank: int, num_ranks: int) -> None:
    """Raises BufferMismatch unless there is one count of 0 or more for each rank and they add up to `num_elems`."""
    if len(counts) != num_ranks or any(count < 0 for count in counts):
        raise BufferMismatch(
            f"{operation} on rank {rank} needs {num_ranks} counts of 0 or more, got {list(counts)}"
        )
    if sum(counts) != num_elems:
        raise BufferMismatch(
            f"{operation} on rank {rank}: counts {list(counts)} add up to {sum(counts)}, but the buffer has "
            f"{num_elems} elements"
        )


def check_slices(buffer: torch.Tensor, *, counts: Sequence[int], rank: int, num_ranks: int) -> None:
    """Raises BufferMismatch unless `buffer`, shape (sum(counts),), is valid for a reduce-scatter with `counts`."""
    check_buffer(buffer, operation="reduce_scatter", rank=rank)
    check_counts(buffer.numel(), counts=counts, operation="reduce_scatter", rank=rank, num_ranks=num_ranks)


def check_part(part: torch.Tensor, *, counts: Sequence[int], rank: int, num_ranks: int) -> None:
    """Raises BufferMismatch unless `part`, shape (counts[rank],), is valid for an all-gather with `counts`."""
    check_buffer(part, operation="all_gather", rank=rank)
    check_counts(sum(counts), counts=counts, operation="all_gather", rank=rank, num_ranks=num_ranks)
    if part.numel() != counts[rank]:
        raise BufferMismatch(
            f"all_gather on rank {rank}: counts give {counts[rank]} elements for this rank, but its part has "
            f"{part.numel()}"
        )


def check_out(out: torch.Tensor | None, *, part: torch.Tensor, counts: Sequence[int], rank: int) -> None:
    """Raises BufferMismatch unless `out` is None or can hold the result of an all-gather of `part` with `counts`."""
    if out is None:
        return
    check_buffer(out, operation="all_gather", rank=rank)
    if out.numel() != sum(counts) or out.dtype != part.dtype or out.device != part.device:
        raise BufferMismatch(
            f"all_gather on rank {rank}: {sum(counts)} elements of {part.dtype} on {part.device} cannot be gathered "
            f"into a tensor of {out.numel()} elements of {out.dtype} on {out.device}"
        )


def filled(out: torch.Tensor | None, whole: torch.Tensor) -> torch.Tensor:
    """Returns `out` with the values of `whole`, or `whole` itself if `out` is None."""
    return whole if out is None else out.copy_(whole)


def check_exchange(
    buffer: torch.Tensor,
    *,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    rank: int,
    num_ranks: int,
) -> None:
    """Raises BufferMismatch unless `buffer`, shape (sum(send_counts),), fits an all-to-all with these counts."""
    operation = "all_to_all"
    check_buffer(buffer, operation=operation, rank=rank)
    check_counts(buffer.numel(), counts=send_counts, operation=operation, rank=rank, num_ranks=num_ranks)
    check_counts(
        sum(receive_counts), counts=receive_counts, operation=operation, rank=rank, num_ranks=num_ranks
    )
    if send_counts[rank] != receive_counts[rank]:
        raise BufferMismatch(
            f"all_to_all on rank {rank}: it sends itself {send_counts[rank]} elements, but receives "
            f"{receive_counts[rank]} from itself"
        )


def check_root(root: int, *, rank: int, num_ranks: int) -> None:
    """Raises BufferMismatch unless `root` is a rank of the group."""
    if not 0 <= root < num_ranks:
        raise BufferMismatch(
            f"broadcast on rank {rank} from root {root}: the group has ranks 0 to {num_ranks - 1}"
        )


def check_groups(groups: Sequence[Sequence[int]], *, num_ranks: int) -> None:
    """Raises BufferMismatch unless `groups` are non-empty, disjoint, and consist of world ranks.

    Every rank passes the same groups, so either every rank raises or none does.
    """
    members = [rank for group in groups for rank in group]
    if len(set(members)) != len(members) or any(not group for group in groups):
        raise BufferMismatch(
            f"split needs non-empty groups without common ranks, got {[list(g) for g in groups]}"
        )
    if any(not 0 <= rank < num_ranks for rank in members):
        raise BufferMismatch(
            f"split got groups {[list(g) for g in groups]} with ranks that do not exist: the world has ranks 0 to "
            f"{num_ranks - 1}"
        )


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of `parts`, each of shape (n,), added from first to last, as a new tensor of their dtype.

    Half types are summed in float32 and rounded once at the end. In float16, the sum of 64 ranks' gradients near 1024
    would overflow, and each addition would round.
    """
    dtype = parts[0].dtype
    # Always a copy: the caller's parts must not change.
    total = parts[0].to(torch.float32 if dtype in HALF_TYPES else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def widened(buffer: torch.Tensor, *, op: ReduceOp) -> torch.Tensor:
    """Returns `buffer`, if needed in a wider dtype that Horovod can reduce with `op`.

    Converting the result back to the dtype of `buffer` gives the exact result in that dtype (modulo 256 for uint8).
    """
    if buffer.dtype is torch.uint8:
        return buffer.int()  # modulo 256, the sum is the same
    if buffer.dtype is torch.float16 and op is ReduceOp.MAX:
        return buffer.float()
    return buffer


def maximum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the elementwise maximum of `parts`, each shape (n,), as a new tensor; NaN if any is NaN."""
    largest = parts[0].clone()
    for part in parts[1:]:
        torch.maximum(largest, part, out=largest)
    return largest


def windows_of(counts: Sequence[int], *, max_elems: int) -> Iterator[tuple[list[int], list[int]]]:
    """Splits a collective operation on the parts of all ranks into several smaller operations.

    Yields (starts, widths) per operation. The operation transfers, of each rank's part, `width` elements from `start`
    on: its window.

    counts: number of elements in each rank's part, the same on every rank, so that all ranks get the same windows.
    max_elems: largest number of elements in one operation, over all parts; at least the number of parts.

    If all parts fit into one operation, only one item is yielded. If all parts are empty, none is yielded.
    """
    if sum(counts) <= max_elems:
        if sum(counts):
            yield [0] * len(counts), list(counts)
        return
    step = max(1, max_elems // len(counts))
    for first in range(0, max(counts), step):
        begins = [min(first, count) for count in counts]
        yield begins, [min(first + step, count) - begin for begin, count in zip(begins, counts, strict=True)]


def pack(
    buffer: torch.Tensor, *, counts: Sequence[int], begins: Sequence[int], widths: Sequence[int]
) -> torch.Tensor:
    """Returns the elements of `buffer` that one operation transfers, concatenated: shape (sum(widths),).

    buffer: the parts of all ranks, concatenated: shape (sum(counts),).
    begins, widths: first element and number of elements to take from each rank's part (see `windows_of`).

    If all elements are taken, returns `buffer` itself, without a copy.
    """
    if list(widths) == list(counts):
        return buffer
    firsts = [offset + begin for offset, begin in zip(offsets_of(counts)[:-1], begins, strict=True)]
    return torch.cat([buffer[first : first + width] for first, width in zip(firsts, widths, strict=True)])


def as_rows(buffer: torch.Tensor, *, counts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Returns the slices of `buffer` as rows of a matrix, shape (len(counts), max(counts)), padded with zeros.

    order: for each row, the index of the slice that the row holds.
    """
    rows = buffer.new_zeros((len(counts), max(counts)))
    slices = buffer.split(list(counts))
    for row, place in enumerate(order):
        rows[row, : counts[place]] = slices[place]
    return rows


def reordered(whole: torch.Tensor, *, counts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Returns a tensor with the parts of `whole` in rank order, shape (sum(counts),).

    whole: the parts of all ranks in the order `order`, shape (sum(counts),).
    counts: number of elements in each rank's part, in rank order.
    order: for each part of `whole`, the rank to which the part belongs.
    """
    parts = dict(zip(order, whole.split([counts[place] for place in order]), strict=True))
    return torch.cat([parts[place] for place in range(len(counts))])


# Host copies of device buffers, for libraries that only read host memory.


def to_host(buffer: torch.Tensor) -> torch.Tensor:
    """Returns `buffer` itself if it is in host memory, otherwise a copy in host memory.

    The copy of a CUDA tensor is in page-locked memory.
    """
    if buffer.device.type == "cpu":
        return buffer
    staged = torch.empty_like(buffer, device="cpu", pin_memory=buffer.device.type == "cuda")
    return staged.copy_(buffer)


@contextlib.contextmanager
def on_host(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields `buffer` in host memory. If that is a copy, it is written back to `buffer` at the end of the block."""
    staged = to_host(buffer)
    yield staged
    if staged is not buffer:
        buffer.copy_(staged)
