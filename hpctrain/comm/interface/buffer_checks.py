"""What all backends ask of buffers and counts, and the sum that does not lose half precision. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hpctrain.comm.interface.communicator import ReduceOp
from hpctrain.errors import BufferMismatch

HALF_TYPES = (torch.float16, torch.bfloat16)
# Counts and displacements of MPI, and so of Horovod, are 32-bit: longer buffers go in pieces. One piece of float64 is
# 2 GiB.
MAX_CHUNK_ELEMS = 2**28
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)


def balanced_counts(num_elems: int, *, num_parts: int) -> list[int]:
    """Lengths of `num_parts` parts of `num_elems` elements: they differ by at most one, longer ones first."""
    whole, rest = divmod(num_elems, num_parts)
    return [whole + (part < rest) for part in range(num_parts)]


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Where each part begins, and at the end the total: one entry more than `counts`."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def check_buffer(buffer: torch.Tensor, *, operation: str, rank: int) -> None:
    """BufferMismatch unless `buffer` is one-dimensional, contiguous and of a dtype that can be sent."""
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise BufferMismatch(
            f"{operation} on rank {rank} needs a contiguous one-dimensional buffer, got shape "
            f"{tuple(buffer.shape)} with strides {buffer.stride()}: pass tensor.contiguous().view(-1)"
        )
    if buffer.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise BufferMismatch(f"{operation} on rank {rank} cannot send {buffer.dtype}: use one of {known}")


def check_counts(num_elems: int, *, counts: Sequence[int], operation: str, rank: int, num_ranks: int) -> None:
    """BufferMismatch unless there is one count for each rank and they add up to `num_elems`."""
    if len(counts) != num_ranks or any(count < 0 for count in counts):
        raise BufferMismatch(
            f"{operation} on rank {rank} needs {num_ranks} counts of 0 or more, got {list(counts)}"
        )
    if sum(counts) != num_elems:
        raise BufferMismatch(
            f"{operation} on rank {rank}: counts {list(counts)} add up to {sum(counts)}, "
            f"the buffer has {num_elems} elements"
        )


def check_part(part: torch.Tensor, *, counts: Sequence[int], rank: int, num_ranks: int) -> None:
    """BufferMismatch unless `part` is what this rank may bring to an all-gather with `counts`."""
    check_buffer(part, operation="all_gather", rank=rank)
    check_counts(sum(counts), counts=counts, operation="all_gather", rank=rank, num_ranks=num_ranks)
    if part.numel() != counts[rank]:
        raise BufferMismatch(
            f"all_gather on rank {rank}: counts say {counts[rank]} elements for this rank, "
            f"its part has {part.numel()}"
        )


def check_exchange(
    buffer: torch.Tensor,
    *,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    rank: int,
    num_ranks: int,
) -> None:
    """BufferMismatch unless this rank may bring `buffer` to an all-to-all with these counts."""
    operation = "all_to_all"
    check_buffer(buffer, operation=operation, rank=rank)
    check_counts(buffer.numel(), counts=send_counts, operation=operation, rank=rank, num_ranks=num_ranks)
    check_counts(
        sum(receive_counts), counts=receive_counts, operation=operation, rank=rank, num_ranks=num_ranks
    )
    if send_counts[rank] != receive_counts[rank]:
        raise BufferMismatch(
            f"all_to_all on rank {rank}: it sends itself {send_counts[rank]} elements and receives "
            f"{receive_counts[rank]} from itself"
        )


def check_root(root: int, *, rank: int, num_ranks: int) -> None:
    """BufferMismatch unless `root` is a rank of the group."""
    if not 0 <= root < num_ranks:
        raise BufferMismatch(
            f"broadcast on rank {rank} from root {root}: the group has ranks 0 to {num_ranks - 1}"
        )


def check_groups(groups: Sequence[Sequence[int]], *, num_ranks: int) -> None:
    """BufferMismatch unless `groups` are non-empty, disjoint, and made of world ranks.

    Every rank passes the same groups, so every rank raises or none does.
    """
    members = [rank for group in groups for rank in group]
    if len(set(members)) != len(members) or any(not group for group in groups):
        raise BufferMismatch(
            f"split needs non-empty groups without common ranks, got {[list(g) for g in groups]}"
        )
    if any(not 0 <= rank < num_ranks for rank in members):
        raise BufferMismatch(
            f"split got groups {[list(g) for g in groups]}: the world has ranks 0 to {num_ranks - 1}"
        )


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of `parts`, each shape (n,), from the first to the last; a new tensor of their dtype.

    Half types are summed in float32 and rounded once at the end: 64 ranks of gradients near 1024 would
    overflow float16 on the way, and each step of a float16 sum would round.
    """
    dtype = parts[0].dtype
    # A copy in any case: the caller's parts stay as they are.
    total = parts[0].to(torch.float32 if dtype in HALF_TYPES else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def widened(buffer: torch.Tensor, *, op: ReduceOp) -> torch.Tensor:
    """`buffer` in a dtype that Horovod reduces with `op`; cut back to its own dtype the result is equal."""
    if buffer.dtype is torch.uint8:
        return buffer.int()  # a sum that wraps, wraps to the same byte
    if buffer.dtype is torch.float16 and op is ReduceOp.MAX:
        return buffer.float()
    return buffer


def maximum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elementwise maximum of `parts`, each shape (n,); a new tensor. NaN wins."""
    largest = parts[0].clone()
    for part in parts[1:]:
        torch.maximum(largest, part, out=largest)
    return largest


def windows_of(counts: Sequence[int], *, max_elems: int) -> Iterator[tuple[list[int], list[int]]]:
    """Pieces of the ranks' parts, together at most `max_elems` elements: begin and width in each part.

    The same on every rank, since `counts` is. One window for anything that fits, none for nothing.
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
    """A window's pieces of each rank's slice of `buffer`, side by side. No copy if it is the whole."""
    if list(widths) == list(counts):
        return buffer
    firsts = [offset + begin for offset, begin in zip(offsets_of(counts)[:-1], begins, strict=True)]
    return torch.cat([buffer[first : first + width] for first, width in zip(firsts, widths, strict=True)])


def as_rows(buffer: torch.Tensor, *, counts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """The slices of `buffer` as rows, shape (len(counts), max(counts)), padded with zeros.

    order: row i holds the slice of place order[i].
    """
    rows = buffer.new_zeros((len(counts), max(counts)))
    slices = buffer.split(list(counts))
    for row, place in enumerate(order):
        rows[row, : counts[place]] = slices[place]
    return rows


def reordered(whole: torch.Tensor, *, counts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """`whole` with its parts in rank order; they are there in `order`: first the part of place order[0]."""
    parts = dict(zip(order, whole.split([counts[place] for place in order]), strict=True))
    return torch.cat([parts[place] for place in range(len(counts))])
