"""Broadcast of many tensors in few messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from hpctrain.comm.collectives.agreement import check_same
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import BufferMismatch

# Above 32 MiB, so that glibc gives a message's memory back (resilience/freed_memory.py).
MESSAGE_BYTES = 64 << 20


def broadcast_tensors(
    comm: Collective,
    tensors: Sequence[torch.Tensor],
    *,
    root: int = 0,
    name: str = "the tensors to broadcast",
) -> None:
    """Copies `tensors` of the group's rank `root` into every rank's, in place. Collective.

    tensors: of any shape and layout. They are sent as raw bytes, so dtypes that a backend cannot reduce (bool,
    bfloat16) are copied too, in messages of up to `MESSAGE_BYTES`, of which a rank has a copy. Raises BufferMismatch on
    every rank, naming those that differ, unless number, shapes and dtypes are the same on all. name: what the tensors
    are, for that message.
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
    """Yields the tensors in lists of up to `MESSAGE_BYTES`; a larger one alone."""
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
    """Returns a text such as `6 tensors: 540000 x float32 (shapes 26832cdb)`. Each group is of one dtype."""
    shapes = repr([[tuple(tensor.shape) for tensor in group] for group in groups])
    mark = hashlib.blake2b(shapes.encode(), digest_size=4).hexdigest()
    sizes = " + ".join(
        f"{sum(tensor.numel() for tensor in group)} x {str(group[0].dtype).removeprefix('torch.')}"
        for group in groups
    )
    return f"{sum(map(len, groups))} tensors: {sizes} (shapes {mark})" if groups else "no tensors"
