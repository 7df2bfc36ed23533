"""int8: one byte a value and one float32 scale for each block of 256 values.

Layout of n encoded values in b = ceil(n / 256) blocks: b float32 scales, then n int8 levels, then nothing.
The scales come first because they need the alignment. A value decodes to scale * level; the last block may be
short.
"""

from __future__ import annotations

from typing import final

import torch

BLOCK = 256
LEVELS = 127


@final
class BlockCodec:
    """`int8`: symmetric, rounded to nearest even, scale = largest magnitude of the block / 127.

    The error of a value is at most half a scale, so at most largest / 254 of its block (and one rounding of
    float32). A block that holds inf or NaN decodes to NaN throughout: the step is skipped.
    """

    name = "int8"
    exact = False

    def num_bytes(self, numel: int, *, dtype: torch.dtype = torch.float32) -> int:
        return 4 * _num_blocks(numel) + numel

    def encode(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        num_blocks = _num_blocks(values.numel())
        scales, levels = out[: 4 * num_blocks].view(torch.float32), out[4 * num_blocks :].view(torch.int8)
        full = values.numel() // BLOCK
        if full:
            _encode(
                values[: full * BLOCK].view(full, BLOCK),
                scales[:full],
                levels[: full * BLOCK].view(full, BLOCK),
            )
        if full < num_blocks:
            _encode(values[full * BLOCK :].view(1, -1), scales[full:], levels[full * BLOCK :].view(1, -1))

    def decode(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        num_blocks = _num_blocks(out.numel())
        scales, levels = data[: 4 * num_blocks].view(torch.float32), data[4 * num_blocks :].view(torch.int8)
        full = out.numel() // BLOCK
        out.copy_(levels)
        if full:
            out[: full * BLOCK].view(full, BLOCK).mul_(scales[:full, None].to(out.dtype))
        if full < num_blocks:
            out[full * BLOCK :].mul_(scales[full:].to(out.dtype))

    def add(self, data: torch.Tensor, *, out: torch.Tensor) -> None:
        decoded = torch.empty_like(out)
        self.decode(data, out=decoded)
        out.add_(decoded)


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _encode(values: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor) -> None:
    low, high = torch.aminmax(values, dim=1)
    largest = torch.maximum(high, low.neg_())
    scales.copy_(largest.div_(LEVELS))
    inverse = torch.where(scales > 0, scales.to(values.dtype).reciprocal(), 0)
    levels.copy_(torch.nan_to_num((values * inverse[:, None]).round_(), nan=0.0).clamp_(-LEVELS, LEVELS))
