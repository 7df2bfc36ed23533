"""Horovod's compressions: what a gradient is sent as. `hpctrain.Compression` has others, with error feedback."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """What DistributedOptimizer takes as a compression: a class or an object with these two functions."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns what is summed over the ranks, and what `decompress` needs to know."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor:
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The compressions that Horovod has."""

    none = NoneCompressor
    fp16 = FP16Compressor
