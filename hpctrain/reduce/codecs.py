"""Codecs that give each value its own place on the wire: fp32, fp16, bf16; and all codecs by name."""

from __future__ import annotations

import threading
from typing import final

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.block_codec import BlockCodec
from hpctrain.reduce.codec import Codec

# Values decoded at a time before they are added: what is decoded must still be in cache when it is read.
PIECE = 1 << 16

CODEC_NAMES = ("fp32", "fp16", "bf16", "int8")


def codec_named(name: str) -> Codec:
    """The codec of that name in the recipe. UsageError when there is none."""
    match name:
        case "fp32":
            return OwnPrecisionCodec()
        case "fp16":
            return CastCodec("fp16", torch.float16)
        case "bf16":
            return CastCodec("bf16", torch.bfloat16)
        case "int8":
            return BlockCodec()
    raise UsageError(f"there is no codec {name!r}: give one of {', '.join(CODEC_NAMES)}")


@final
class OwnPrecisionCodec:
    """`fp32`: every value in its own precision, so float32 in 4 bytes and float64 in 8, bit for bit."""

    name = "fp32"
    exact = True

    def num_bytes(self, numel: int, *, dtype: torch.dtype = torch.float32) -> int:
        return numel * dtype.itemsize

    def encode(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        out.view(values.dtype).copy_(values)

    def decode(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(data.view(out.dtype))

    def add(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        out.add_(data.view(out.dtype))


@final
class CastCodec:
    """`fp16` and `bf16`: rounded to nearest even, 2 bytes a value.

    Relative error at most 2^-11 (fp16, for magnitudes from 2^-14 to 65504; below, absolute error at most
    2^-25; above, inf) and 2^-8 (bf16, the range of float32; below 2^-126, absolute error at most 2^-134).
    """

    exact = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._scratch = threading.local()

    def num_bytes(self, numel: int, *, dtype: torch.dtype = torch.float32) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        out.view(self._dtype).copy_(values)

    def decode(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(data.view(self._dtype))

    def add(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        # An addition of two dtypes is a hundred times slower than a conversion and an addition of one.
        scratch = self._scratch_for(out.dtype)
        for piece, total in zip(data.view(self._dtype).split(PIECE), out.split(PIECE), strict=True):
            decoded = scratch[: total.numel()]
            decoded.copy_(piece)
            total.add_(decoded)

    def _scratch_for(self, dtype: torch.dtype) -> torch.Tensor:
        """This thread's memory for a decoded piece."""
        found: torch.Tensor | None = getattr(self._scratch, str(dtype), None)
        if found is None:
            found = torch.empty(PIECE, dtype=dtype)
            setattr(self._scratch, str(dtype), found)
        return found
