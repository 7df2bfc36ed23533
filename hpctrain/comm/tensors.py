"""Many tensors in few messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.comm.communicator import Collective


def broadcast_tensors(comm: Collective, tensors: Sequence[torch.Tensor], *, root: int = 0) -> None:
    """Copy `tensors` of the group's rank `root` into every rank's, in place. Collective.

    tensors: same number, shapes and dtypes on every rank, of any layout. Each dtype travels as one message
    of raw bytes, so dtypes that a backend cannot reduce (bool, bfloat16) are copied too.
    """
    if comm.num_ranks == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for (dtype, _), group in by_kind.items():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group]).view(torch.uint8)
            comm.broadcast(flat, root=root)
            received = flat.view(dtype)
            offset = 0
            for tensor in group:
                tensor.copy_(received[offset : offset + tensor.numel()].view(tensor.shape))
                offset += tensor.numel()
