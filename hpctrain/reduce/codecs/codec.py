"""What a value codec is: float values to bytes for the wire, and back. Pure; no rank knows of another here."""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes a run of values by itself, without knowing what stands before or behind it.

    Values are contiguous one-dimensional float32 or float64 tensors in host memory; encoded data are
    contiguous uint8 tensors, 8-byte aligned, of exactly `num_bytes(n)` bytes for n values. n may be 0.
    Deterministic: the same values give the same bytes. inf and NaN come out as values that are not finite.
    """

    @property
    def name(self) -> str:
        """`fp32`, `fp16`, `bf16` or `int8`."""

    @property
    def exact(self) -> bool:
        """Whether decoding gives back the bits that were encoded."""

    def num_bytes(self, numel: int, *, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of `numel` encoded values of `dtype`."""

    def encode(self, values: torch.Tensor, *, out: torch.Tensor) -> None: ...

    def decode(self, data: torch.Tensor, *, out: torch.Tensor) -> None: ...

    def add(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        """out += decoded data."""
