"""Numbers that tell whether two ranks hold the same bits. Not collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from hpctrain.distributed import local_part

_ROW = 4096
# Odd, so that multiplication modulo 2**64 loses nothing.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns a number for the bits of each tensor. Reads each tensor once; waits for a device once."""
    found: list[int | torch.Tensor] = []
    for tensor in tensors:
        content = _bytes_of(local_part(tensor.detach()))
        if content.device.type == "cpu":
            found.append(xxhash.xxh3_64_intdigest(content.numpy().data))
        else:
            found.append(_device_digest(content))
    on_device = [digest for digest in found if isinstance(digest, torch.Tensor)]
    values = iter(torch.stack([digest.cpu() for digest in on_device]).tolist() if on_device else ())
    return [digest if isinstance(digest, int) else next(values) for digest in found]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes in memory order: uint8, shape (n,). A copy only if the memory has gaps."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order).contiguous().view(-1).view(torch.uint8)


def _device_digest(content: torch.Tensor) -> torch.Tensor:
    """Returns a sum over rows of which each has another weight: int64, shape (). content: uint8, shape (n,)."""
    if content.data_ptr() % 4 == 0 and content.numel() % 4 == 0:
        content = content.view(torch.int32)
    whole = content.numel() - content.numel() % _ROW
    sums = torch.cat([
        content[:whole].view(-1, _ROW).sum(dim=1, dtype=torch.int64), content[whole:].to(torch.int64),
    ])  # fmt: skip
    weights = torch.arange(1, sums.numel() + 1, device=sums.device) * _FACTOR
    return (sums * (weights | 1)).sum()


def describe_settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the hyper-parameters of an optimizer's groups in words, by a name such as `lr of parameter group 0`.

    Numbers, texts, tensors of one element, and sequences of these; what else a group holds is left out.
    """
    found = {}
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key != "params" and (text := _text(value)) is not None:
                found[f"{key} of parameter group {number}"] = text
    return found


def _text(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return _text(value.item()) if value.numel() == 1 else None
    if isinstance(value, float):
        return repr(float(value))  # of numpy's too
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        parts = [_text(part) for part in value]
        return None if any(part is None for part in parts) else f"({', '.join(map(str, parts))})"
    return None
