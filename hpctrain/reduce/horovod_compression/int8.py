"""8-bit integers that Horovod can sum: all ranks use the same scale, and few enough levels that the sum fits.

Each parameter has a range, the same on all ranks: values beyond it are clipped, and clipping and rounding errors
are fed back into the next step. With N ranks there are 127 // N levels on each side of zero, so that no sum of
N exceeds 8 bits. All ranks adapt the range alike: in front of its levels each rank sends votes on whether the range
was too small or too large for its values. A parameter whose range is unknown, or far too small, is sent in full
precision once; the summed header of that message shows the largest magnitude on any rank.

A message is HEADER int8 values and the levels, four per int32 (`int8_packing.py`). The header's first 32 are
the bits of the float32 scale: from their sums every rank verifies that all used the same scale, and that Horovod
summed rather than averaged.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.horovod_compression.error_feedback import GradientOwners, HvdResiduals, largest_magnitude

ONES = 0x01010101


def num_words(num_values: int) -> int:
    return -(-num_values // 4)


def pack(values: torch.Tensor, *, levels: int) -> torch.Tensor:
    """Packs int8 `values` within +-levels, shape (4 n,), in place. Returns the memory as int32 words, shape (n,)."""
    words = values.view(torch.int32)
    # uint8 arithmetic wraps: -3 is 253, and 253 + 5 is 2.
    values.view(torch.uint8).add_(levels)
    return words.sub_(levels * ONES)


def unpack(words: torch.Tensor, *, levels: int, num_ranks: int) -> torch.Tensor:
    """Unpacks summed `words` in place. Returns the sums over `num_ranks` as int8, shape (4 n,), on the same memory."""
    words.add_(num_ranks * levels * ONES)
    return words.view(torch.uint8).sub_(num_ranks * levels).view(torch.int8)


LARGEST = 127
SCALE_BITS = 32
# Votes: not finite; more than FAR times the range; more than the range; more than half of it.
VOTES = 4
HEADER = SCALE_BITS + VOTES
FAR = 4.0
STEP = 1.25  # factor by which a range grows or shrinks per step
# Ranges are 2^SMALLEST to 2^HIGHEST; beyond them values are sent in full precision. That message begins with one
# element for each quarter of an octave, one below and one above: a rank sets that of its largest magnitude to 1.
SMALLEST, HIGHEST, QUARTERS = -100, 120, 4
FULL_HEADER = QUARTERS * (HIGHEST - SMALLEST) + 2


@dataclass(frozen=True, slots=True)
class _Sent:
    """Context for `decompress`. scale: size of a level; None if full precision was sent."""

    name: str
    gradient: torch.Tensor
    scale: float | None


@final
class Int8Compression:
    """Sends one byte per value and 36 per parameter. Needs op=hvd.Sum; the result is the mean over `num_ranks`.

    The mean is bitwise equal on every rank, in any order of summing. If a rank's gradient is not finite, the result
    is NaN on every rank. More ranks mean fewer levels: with more than 16 (7 levels on each side) Compression.fp16 is
    the better choice; 127 is the limit.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]], *, num_ranks: int) -> None:
        if not 1 <= num_ranks <= LARGEST:
            raise UsageError(
                f"num_ranks is {num_ranks}: int8 sums over Horovod support 1 to {LARGEST} ranks. Pass "
                "hvd.size(); with more ranks use Compression.fp16"
            )
        self._num_ranks = num_ranks
        self._levels = LARGEST // num_ranks
        self._owners = GradientOwners(named_parameters)
        self._residuals = HvdResiduals(self._owners, num_ranks=num_ranks)
        self._ranges: dict[str, float] = {}

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Sent]:
        name = self._owners.owner_of(tensor)
        value = self._residuals.added_to(tensor, name=name)
        largest = largest_magnitude(value)
        if name not in self._ranges:
            if math.isfinite(largest):
                self._residuals.keep(torch.zeros_like(value), name=name)
            header = torch.zeros(FULL_HEADER, dtype=value.dtype, device=value.device)
            header[_place(largest)] = 1
            return torch.cat([header, value]), _Sent(name, tensor, None)
        span = self._ranges[name]
        scale = _float32(span / self._levels)
        finite = math.isfinite(largest)
        votes = [not finite, largest > FAR * span, largest > span, largest > span / 2]
        end = HEADER + value.numel()
        sent = torch.empty(4 * num_words(end), dtype=torch.int8, device=value.device)
        sent[:HEADER] = torch.tensor([*_bits(scale), *map(int, votes)], dtype=torch.int8)
        sent[end:] = 0
        if finite:
            levels = (value / scale).round_().clamp_(-self._levels, self._levels)
            sent[HEADER:end] = levels
            self._residuals.keep(value.sub_(levels.mul_(scale)), name=name)
        else:
            sent[HEADER:end] = 0
        return pack(sent, levels=self._levels), _Sent(name, tensor, scale)

    def decompress(self, tensor: torch.Tensor, ctx: _Sent | None) -> torch.Tensor:
        if ctx is None:
            return tensor / self._num_ranks  # a sparse gradient, which Horovod gathered and summed itself
        if ctx.scale is None:
            mean = self._from_full_precision(tensor, name=ctx.name)
        else:
            dtype = torch.promote_types(ctx.gradient.dtype, torch.float32)
            sums = unpack(tensor, levels=self._levels, num_ranks=self._num_ranks)
            sums = sums[: HEADER + ctx.gradient.numel()]
            mean = self._from_levels(sums, name=ctx.name, scale=ctx.scale, dtype=dtype)
        return mean.to(ctx.gradient.dtype).view(ctx.gradient.shape)

    def _from_full_precision(self, total: torch.Tensor, *, name: str) -> torch.Tensor:
        counts = total[:FULL_HEADER].tolist()
        if sum(counts) != self._num_ranks:
            raise _wrong_sum(name, found=sum(counts), num_ranks=self._num_ranks)
        highest = max(place for place, count in enumerate(counts) if count)
        self._set_range(name, 2.0 ** (SMALLEST + highest / QUARTERS))
        return total[FULL_HEADER:] / self._num_ranks

    def _from_levels(
        self, total: torch.Tensor, *, name: str, scale: float, dtype: torch.dtype
    ) -> torch.Tensor:
        header = total[:HEADER].tolist()
        for found, bit in zip(header, _bits(scale), strict=False):
            if found != bit * self._num_ranks:
                raise _wrong_sum(name, found=found, num_ranks=self._num_ranks)
        not_finite, far, above, above_half = header[SCALE_BITS:]
        levels = total[HEADER:].to(dtype)
        if not_finite:
            return levels.fill_(math.nan)
        span = self._ranges[name]
        if far:
            del self._ranges[name]  # measured again in the next step, which also sends what was clipped
        elif above:
            self._set_range(name, span * STEP)
        elif not above_half:
            self._set_range(name, span / STEP)
        return levels.mul_(scale / self._num_ranks)

    def _set_range(self, name: str, span: float) -> None:
        if 2.0**SMALLEST < span < 2.0**HIGHEST:
            self._ranges[name] = _float32(span)
        else:
            self._ranges.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """See `HvdCompression.state_dict`. The state has the residuals of this rank, and `ranges`: name of a parameter
        -> largest magnitude that int8 represents, the same on all ranks."""
        return {"kind": "int8", "ranges": dict(self._ranges), **self._residuals.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "int8":
            raise UsageError(f"this is the state of {state.get('kind')!r} compression, not of int8")
        self._residuals.load_state_dict(state)
        self._ranges = dict(state["ranges"])


def _place(largest: float) -> int:
    """Returns the index in the header of a full-precision message that represents magnitude `largest`."""
    if largest < 2.0**SMALLEST:
        return 0
    if not largest < 2.0**HIGHEST:  # or NaN
        return FULL_HEADER - 1
    return 1 + math.floor(QUARTERS * (math.log2(largest) - SMALLEST))


def _float32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def _bits(number: float) -> list[int]:
    (word,) = struct.unpack("<I", struct.pack("<f", number))
    return [(word >> place) & 1 for place in range(SCALE_BITS)]


def _wrong_sum(name: str, *, found: float, num_ranks: int) -> UsageError:
    return UsageError(
        f"int8 compression of {name!r}: a check value sent by {num_ranks} ranks was reduced to {found:g}, which is not "
        f"their sum. Pass op=hvd.Sum to hvd.DistributedOptimizer (the resulting gradients are the mean) and "
        "num_ranks=hvd.size() to the compression; if both are right, the ranks loaded different compression states"
    )
