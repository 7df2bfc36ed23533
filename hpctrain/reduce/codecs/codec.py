"""Interface of a codec: float values to bytes for the wire, and back. Pure; nothing here communicates."""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes values into `out`, and decodes data into `out`, independently of their position in the bucket.

    Values are contiguous one-dimensional float32 or float64 tensors in host memory; encoded data are
    contiguous uint8 tensors, 8-byte aligned, of exactly `num_bytes(n)` bytes for n values. n may be 0.
    Deterministic: the same values give the same bytes. inf and NaN decode to values that are not finite.
    """

    @property
    def name(self) -> str:
        """`fp32`, `fp16`, `bf16` or `int8`."""

    @property
    def exact(self) -> bool:
        """True if decoding returns the encoded values bit for bit."""

    def num_bytes(self, numel: int, *, dtype: torch.dtype = torch.float32) -> int:
        """Returns the number of bytes of `numel` encoded values of `dtype`."""

    def encode(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        """Encodes `values`, shape (n,), into `out`, shape (num_bytes(n),), uint8."""

    def decode(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        """Decodes `data`, shape (num_bytes(n),), uint8, into `out`, shape (n,)."""

    def add(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        """Adds the decoded `data`, shape (num_bytes(n),), uint8, to `out`, shape (n,)."""
