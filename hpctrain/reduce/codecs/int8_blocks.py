"""int8: one byte per value and one float32 scale per block of 256 values.

Layout of n encoded values in b = ceil(n / 256) blocks: b float32 scales, then n int8 levels. The scales come
first because they need the alignment. A value decodes to scale * level. Only the last block may be short.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch

from hpctrain.reduce.codecs.cache_scratch import PIECE, scratch

BLOCK = 256
LEVELS = 127  # symmetric: -128 is not used
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32; its reciprocal is finite

# Values, shape (blocks, values per block); their scales, shape (blocks, 1); their levels, shape of the values.
_Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@final
class BlockCodec:
    """`int8`: symmetric, rounded to nearest even; a block's scale is its largest magnitude / 127.

    Error of a value: at most 1/253 of the largest magnitude in its block, or 2^-126 if that is more (half a
    level and float32's own rounding; scales are never denormal). A block that contains inf, NaN or a value outside
    float32's range decodes to inf and NaN throughout, so that a step with it is skipped.
    """

    name = "int8"
    exact = False

    def num_bytes(self, numel: int, *, dtype: torch.dtype = torch.float32) -> int:
        return 4 * _num_blocks(numel) + numel

    def encode(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        work = scratch("levels", torch.float32)
        for piece, scales, levels in _pieces(values, out):
            if piece.dtype != torch.float32:
                piece = scratch("values", torch.float32)[: piece.numel()].view(piece.shape).copy_(piece)
            exact = work[: piece.numel()].view(piece.shape)
            torch.abs(piece, out=exact)
            # amax and clamp propagate NaN: a block with one gets a scale that is not finite.
            torch.amax(exact, dim=1, keepdim=True, out=scales)
            scales.mul_(1 / LEVELS).clamp_(min=SMALLEST_SCALE)
            torch.mul(piece, scales.reciprocal(), out=exact)
            levels.copy_(exact.round_())

    def decode(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        for piece, scales, levels in _pieces(out, data):
            piece.copy_(levels).mul_(scales.to(out.dtype))

    def add(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        decoded = scratch("values", out.dtype)
        for piece, scales, levels in _pieces(out, data):
            summand = decoded[: piece.numel()].view(piece.shape)
            piece.add_(summand.copy_(levels).mul_(scales.to(out.dtype)))


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _pieces(values: torch.Tensor, data: torch.Tensor) -> Iterator[_Piece]:
    """Yields views of whole blocks, up to PIECE values at a time, then the remaining values as one short block."""
    num_blocks, full = _num_blocks(values.numel()), values.numel() // BLOCK
    scales = data[: 4 * num_blocks].view(torch.float32).view(-1, 1)
    levels = data[4 * num_blocks :].view(torch.int8)
    rows, whole = PIECE // BLOCK, full * BLOCK
    if full:
        yield from zip(
            values[:whole].view(-1, BLOCK).split(rows),
            scales[:full].split(rows),
            levels[:whole].view(-1, BLOCK).split(rows),
            strict=True,
        )
    if full < num_blocks:
        yield values[whole:].view(1, -1), scales[full:], levels[whole:].view(1, -1)
