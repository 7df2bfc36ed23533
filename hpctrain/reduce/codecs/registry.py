"""Codecs that encode each value separately (fp32, fp16, bf16), and the lookup of all codecs by name."""

from __future__ import annotations

from typing import final

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.codecs.cache_scratch import PIECE, scratch
from hpctrain.reduce.codecs.codec import Codec
from hpctrain.reduce.codecs.int8_blocks import BlockCodec

CODEC_NAMES = ("fp32", "fp16", "bf16", "int8")


def codec_named(name: str) -> Codec:
    """Returns the codec with this name in the recipe. Raises UsageError if there is none."""
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
    """`fp32`: every value unchanged, so float32 in 4 bytes and float64 in 8."""

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
    """`fp16` and `bf16`: rounded to nearest even, 2 bytes per value.

    fp16: relative error at most 2^-11 for magnitudes from 2^-14 to 65504, absolute error at most 2^-25 below,
    inf from 65520 on. bf16: relative error at most 2^-8 up to 3.38e38, where inf begins; absolute error at most
    2^-134 below 2^-126. A float64 is rounded to float32 first, which adds a relative error of 2^-24.
    """

    exact = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def num_bytes(self, numel: int, *, dtype: torch.dtype = torch.float32) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        out.view(self._dtype).copy_(values)

    def decode(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(data.view(self._dtype))

    def add(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        # Adding two dtypes is a hundred times slower than converting and adding the same dtype.
        summand = scratch("values", out.dtype)
        for piece, total in zip(data.view(self._dtype).split(PIECE), out.split(PIECE), strict=True):
            total.add_(summand[: total.numel()].copy_(piece))
