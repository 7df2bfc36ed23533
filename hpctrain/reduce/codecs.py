"""Codecs, which encode values to wire bytes and back (fp32, fp16, bf16, int8 blocks), and error feedback."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, final

import torch

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor
from hpctrain.reduce.wire_formats import encodes_every_value, wire_format, wire_names
from hpctrain.storage import part_of

# Per-thread scratch memory for one piece of a tensor at a time, small enough to stay in cache.


# Number of values of a piece, a multiple of every codec's block. 512 KB of float32: fits into the second-level
# cache, and large enough to make the microseconds of each torch call negligible.
PIECE = 1 << 17

_of_thread = threading.local()


def scratch(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns this thread's scratch tensor `name` of `dtype`, shape (PIECE,), with arbitrary contents."""
    key = f"{name} {dtype}"
    found: torch.Tensor | None = getattr(_of_thread, key, None)
    if found is None:
        found = torch.empty(PIECE, dtype=dtype)
        setattr(_of_thread, key, found)
    return found


# Interface of a codec: float values to bytes for the wire, and back. Pure; nothing here communicates.


class Codec(Protocol):
    """Encodes values as bytes and decodes them. The result does not depend on the position of the values in a bucket.

    Values are contiguous one-dimensional float32 or float64 tensors in host memory; encoded data are
    contiguous uint8 tensors, 8-byte aligned, of exactly `num_bytes(n)` bytes for n values. n may be 0.
    Encoding is deterministic: the same values give the same bytes. Encoded inf and NaN decode to inf or NaN.
    """

    @property
    def name(self) -> str:
        """The name of the codec's wire format."""

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


# int8: one byte per value and one float32 scale per block of 256 values.
#
# Layout of n encoded values in b = ceil(n / 256) blocks: b float32 scales, then n int8 levels. The scales
# come first because they need the alignment. A value decodes to scale * level. Only the last block may be
# short.


BLOCK = 256
LEVELS = 127  # symmetric: -128 is not used
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32; its reciprocal is finite

# Values, shape (blocks, values per block); their scales, shape (blocks, 1); their levels, shape of the values.
_Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@final
class BlockCodec:
    """`int8`: symmetric, rounded to nearest even; the scale of a block is its largest magnitude divided by 127.

    Error of a value: at most 1/253 of the largest magnitude in its block, or 2^-126 if that is more (half a
    level and float32's own rounding; scales are never denormal). If a block contains inf, NaN or a value outside
    float32's range, all values of the block decode to inf or NaN, so that the step is skipped.
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


# Codecs that encode each value separately (fp32, fp16, bf16), and the lookup of all codecs by name.


def codec_named(name: str) -> Codec:
    """Returns the codec with this name in the recipe. Raises UsageError for an unknown name."""
    if not encodes_every_value(name):
        names = (known for known in wire_names() if encodes_every_value(known))
        raise UsageError(f"there is no codec {name!r}: give one of {', '.join(names)}")
    codec: Codec = wire_format(name).imported()()
    return codec


@final
class OwnPrecisionCodec:
    """`fp32`: every value is sent unchanged, a float32 in 4 bytes and a float64 in 8 bytes."""

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
    """`fp16` and `bf16`: values are rounded to nearest even, 2 bytes per value.

    fp16: the relative error is at most 2^-11 for magnitudes from 2^-14 to 65504; for magnitudes below 2^-14, the
    absolute error is at most 2^-25; magnitudes of 65520 or more become inf. bf16: the relative error is at most 2^-8
    for magnitudes from 2^-126 to 3.38e38, above which values become inf; for magnitudes below 2^-126, the absolute
    error is at most 2^-134. A float64 is rounded to float32 first, which adds a relative error of 2^-24.
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


def float16_codec() -> CastCodec:
    """Returns the codec of `fp16`."""
    return CastCodec("fp16", torch.float16)


def bfloat16_codec() -> CastCodec:
    """Returns the codec of `bf16`."""
    return CastCodec("bf16", torch.bfloat16)


# Rows of a saved tensor: a rank reads those that it needs, not the rows of all ranks. Pure.


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """Returns the shape of each tensor by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def rows_in(saved: torch.Tensor, *, rows: Sequence[range]) -> torch.Tensor:
    """Returns the rows `rows` of a tensor, shape (number of these rows, ...).

    saved: either the whole tensor, shape (all rows, ...), or a tensor that consists of just these rows, which is
    returned as it is.
    rows: ranges of row indices, ascending, without overlap.
    """
    if saved.shape[0] == sum(map(len, rows)):
        return saved
    return torch.cat([saved[found.start : found.stop] for found in rows])


# Error feedback: a rank's residual, the part of its gradient not yet sent, is added to its next gradient
# (Seide et al. 2014).
#
# Residuals are kept in gradient space, the concatenation of all flattened trainable parameters in the
# optimizer's order, so that they do not depend on the buckets.


NAME = "residual"
# Residuals of the transport reducer's codecs, with one row per node: see `InterNodeResiduals.state`.
LOST = "lost"


def gradient_space(buckets: Sequence[Bucket]) -> tuple[dict[int, int], int]:
    """Returns each parameter's offset in gradient space, and the length of that space, in elements. Pure.

    Gradient space is the concatenation of all flattened parameters in the optimizer's order.

    buckets: the buckets of a plan, which together contain every trainable parameter.
    """
    numels = {slot.parameter: slot.numel for bucket in buckets for slot in bucket.slots}
    positions, total = {}, 0
    for parameter in sorted(numels):
        positions[parameter] = total
        total += numels[parameter]
    return positions, total


@final
class Residuals:
    """This rank's residuals, one row of a global tensor of shape (num_ranks, elements).

    A residual is a rounding error that is added to the gradients of the next step. The object keeps two rows: the
    residuals at the start of a step, and the new residuals, which take effect only if the step is applied. Residuals
    have the unit of the buckets, gradients times loss scale. Their dtype is float32, or float64 if any bucket is
    float64.
    """

    def __init__(self, *, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._positions: dict[int, int] = {}
        self._row = torch.zeros(0)
        self._left = torch.zeros(0)

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None:
        """Allocates residuals for the buckets' parameters; keeps their values if the parameters are unchanged."""
        before = self._positions, self._row
        self._positions, total = gradient_space(buckets)
        wide = any(bucket.dtype is torch.float64 for bucket in buckets)
        self._row = torch.zeros(total, dtype=torch.float64 if wide else torch.float32, device=device)
        if before[0] == self._positions and before[1].numel() == total:
            self._row.copy_(before[1])
        self._left = self._row.clone()

    def of(self, slot: Slot) -> torch.Tensor:
        """Returns the residual of one parameter at the start of the step, shape (slot.numel,); read-only."""
        begin = self._positions[slot.parameter]
        return self._row[begin : begin + slot.numel]

    def left(self, slot: Slot) -> torch.Tensor:
        """Returns the new residual of one parameter, shape (slot.numel,). The caller must write it in every step."""
        begin = self._positions[slot.parameter]
        return self._left[begin : begin + slot.numel]

    def end_step(self, *, applied: bool, rescale: float) -> None:
        """Ends the step. If the step was `applied`, the new residuals replace the old residuals.

        rescale: the loss scale of the next step divided by that of this step; residuals are multiplied by this
        quotient.
        """
        if applied:
            self._row, self._left = self._left, self._row
        if rescale != 1.0:
            self._row.mul_(rescale)

    def add_to(self, memory: torch.Tensor, bucket: Bucket) -> None:
        """Adds the residual of each of the bucket's parameters to `memory`, shape (bucket.numel,)."""
        for slot in bucket.slots:
            memory[slot.offset : slot.offset + slot.numel] += self.of(slot)

    def state(self) -> list[StateTensor]:
        total = self._row.numel()
        return [StateTensor(
            name=NAME, tensor=self._row.view(1, total), global_shape=(self._num_ranks, total),
            offset=(self._rank, 0),
        )]  # fmt: skip

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        """See `BucketReducer.rows_to_load`.

        Returns this rank's row; if the checkpoint was saved by another number of ranks, this rank's share of all rows.
        """
        name = _saved_name(shapes)
        if name is None or len(shapes[name]) != 2:
            return {}
        num_rows = shapes[name][0]
        if name == NAME and num_rows == self._num_ranks:
            return {name: [range(self._rank, self._rank + 1)]}
        return {name: [range(*part_of(num_rows, part=self._rank, num_parts=self._num_ranks))]}

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """Restores this rank's residuals. Without saved residuals, all residuals are 0.

        If the checkpoint was saved by another number of ranks, the saved rows are divided over the ranks, and each rank
        adds up its rows: so each saved residual is sent exactly once.
        Raises CheckpointError if the residuals are of another model.
        """
        self._row.zero_()
        shapes = shapes_of(tensors) if shapes is None else shapes
        name = _saved_name(shapes)
        if name is None:
            return
        if len(shapes[name]) != 2 or shapes[name][1] != self._row.numel():
            raise CheckpointError(
                f"the checkpoint's residuals have shape {tuple(shapes[name])}, this model needs "
                f"(ranks, {self._row.numel()}): resume with the same model and frozen parameters as the saved run"
            )
        rows = rows_in(tensors[name], rows=self.rows_to_load(shapes)[name])
        self._row.copy_(rows.sum(dim=0, dtype=torch.float64))


def _saved_name(shapes: Shapes) -> str | None:
    return next((name for name in (NAME, LOST) if name in shapes), None)


# Error feedback of a codec: the error of an encoding is added to the values of the next one.
#
# Source: Seide et al. 2014 (1-bit SGD), doi:10.21437/Interspeech.2014-274; Karimireddy et al. 2019,
# arXiv:1901.09847.


@final
class NoFeedback:
    """Encodes without error feedback."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode(self, values: torch.Tensor, *, first: int, out: torch.Tensor) -> None:
        self._codec.encode(values, out=out)

    def encode_sum(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        self._codec.encode(values, out=out)


@final
class CodecFeedback:
    """The encoding errors of one carrier's part of a chunk, which are added to the values of the next step.

    A carrier is a rank that exchanges a part of a chunk with the other nodes (see `shared_buckets.py`). A carrier keeps
    the errors of the slices that it sends to the owners of the slices, and of the sum of the slice that it owns.

    The new errors of a step take effect when `end_step` reports that the step was applied. A step that was skipped
    (gradients not finite) changes nothing.
    """

    def __init__(
        self, codec: Codec, *, numel: int, own: slice, num_gradients: int, dtype: torch.dtype
    ) -> None:
        """Sets all errors to 0.

        numel: number of elements of the part.
        own: the slice of the part that this rank sums.
        num_gradients: number of elements with error feedback, which come first in the part. The elements after them
        are flags, which must not affect later steps.
        dtype: dtype of the errors.
        """
        self._codec = codec
        self.own = own
        self._num_gradients = num_gradients
        # The own slice, which is not sent to an owner, holds the error of its sum.
        self.lost = torch.zeros(numel, dtype=dtype)
        self._new = torch.zeros(numel, dtype=dtype)

    def encode(self, values: torch.Tensor, *, first: int, out: torch.Tensor) -> None:
        """Encodes `values` plus their earlier errors into `out`, and keeps the new errors. Changes `values`.

        first: offset of the values in the part.
        """
        place = slice(first, first + values.numel())
        values.add_(self.lost[place])
        self._codec.encode(values, out=out)
        new = self._new[place]
        self._codec.decode(out, out=new)
        torch.sub(values, new, out=new)
        new[max(0, self._num_gradients - first) :].zero_()

    def encode_sum(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        self.encode(values, first=self.own.start, out=out)

    def add_to(self, values: torch.Tensor, *, first: int) -> None:
        """Adds the earlier errors of `values` to `values`. These are not encoded, so their new errors are 0.

        first: offset of the values in the part.
        """
        place = slice(first, first + values.numel())
        values.add_(self.lost[place])
        self._new[place].zero_()

    def end_step(self, *, applied: bool, rescale: float) -> None:
        """Ends the step. If the step was `applied`, the new errors replace the old errors.

        rescale: the loss scale of the next step divided by that of this step; the errors are multiplied by this
        quotient.
        """
        if applied:
            self.lost, self._new = self._new, self.lost
        if rescale != 1:
            self.lost.mul_(rescale)
