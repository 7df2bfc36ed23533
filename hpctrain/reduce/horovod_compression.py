"""Gradient compression for plain Horovod scripts: `Compression`, for hvd.DistributedOptimizer(compression=...).

Horovod calls `compress(p.grad)` when a gradient is ready, sums the returned tensor over the ranks, and uses the result
of `decompress` as the gradient. So the compressed tensor must be summable by addition in its dtype. This allows
float16, and 8-bit integers with a scale that all ranks know beforehand. Low-rank compression needs two dependent sums,
and Horovod does not support bfloat16; both are wire formats of hpctrain's own updater.

Imports neither Horovod nor anything else of `hpctrain.reduce`.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, final

import torch

from hpctrain.errors import UsageError


@final
class GradientOwners:
    """Finds the name of a parameter by its gradient.

    Horovod compresses `p.grad` itself, one parameter at a time. The order differs between ranks if parameters are
    unused, and the gradients are new tensors in each step; so a parameter is identified by `p.grad is tensor`. The
    parameter that followed in the previous step is tried first: searching all parameters each time would take
    quadratic time.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._parameters = dict(named_parameters)
        if not self._parameters:
            raise UsageError(
                "the compression has no named parameters: pass model.named_parameters(). A generator that "
                "was used before is empty"
            )
        self._next_after: dict[str, str] = {}
        self._last = ""

    def names(self) -> list[str]:
        return list(self._parameters)

    def parameter(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def owner_of(self, gradient: torch.Tensor) -> str:
        """Returns the name of the parameter whose gradient is `gradient`. Raises UsageError if there is none."""
        guess = self._next_after.get(self._last)
        if guess is None or self._parameters[guess].grad is not gradient:
            guess = next((n for n, p in self._parameters.items() if p.grad is gradient), None)
            if guess is None:
                raise UsageError(
                    f"Horovod passed a tensor of shape {tuple(gradient.shape)} that is the gradient of none of the "
                    f"compression's {len(self._parameters)} named parameters. Pass all parameters of the model to the "
                    "compression; op=hvd.Adasum and sparse_as_dense=True cannot be used with it"
                )
            self._next_after[self._last] = guess
        self._last = guess
        return guess


@final
class HvdResiduals:
    """Residuals of this rank (error feedback) by parameter name, in units of the gradient.

    They are flat tensors, float32 or float64.
    """

    def __init__(self, owners: GradientOwners, *, num_ranks: int) -> None:
        self._owners = owners
        self._num_ranks = num_ranks
        self._kept: dict[str, torch.Tensor] = {}

    def added_to(self, gradient: torch.Tensor, *, name: str) -> torch.Tensor:
        """Returns the gradient plus its residual as a new tensor of shape (n,), float32 or float64."""
        flat = gradient.detach().reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32))
        kept = self._kept.get(name)
        if kept is None:
            return flat.clone()
        return flat + kept.to(flat.device)

    def keep(self, residual: torch.Tensor, *, name: str) -> None:
        self._kept[name] = residual

    def state_dict(self) -> dict[str, Any]:
        return {"num_ranks": self._num_ranks, "residuals": {n: t.clone() for n, t in self._kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. Raises UsageError, without changes, if names or sizes do not match this model.

        If the number of ranks differs, warns and starts with zero residuals.
        """
        saved: Mapping[str, torch.Tensor] = state.get("residuals", {})
        known = set(self._owners.names())
        for name, tensor in saved.items():
            if name not in known:
                raise UsageError(f"the saved compression has a parameter {name!r}, which this model lacks")
            numel = self._owners.parameter(name).numel()
            if tensor.numel() != numel:
                raise UsageError(
                    f"the saved residual of {name!r} has {tensor.numel()} values, the parameter {numel}: it was "
                    "saved from another model"
                )
        if saved and state["num_ranks"] != self._num_ranks:
            warnings.warn(
                f"the saved residuals of {state['num_ranks']} ranks cannot be used: there are {self._num_ranks} now, "
                "and they start at zero: about one step's rounding errors are lost",
                stacklevel=3,
            )
            saved = {}
        self._kept = {n: t.clone().reshape(-1) for n, t in saved.items()}


def largest_magnitude(values: torch.Tensor) -> float:
    """Returns the largest absolute value; NaN if a value is not finite, 0 if there are none.

    It is faster than `isfinite().all()`.
    """
    if values.numel() == 0:
        return 0.0
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return max(-low, high) if math.isfinite(low + high) else math.nan


ONES = 0x01010101


def num_words(num_values: int) -> int:
    return -(-num_values // 4)


def pack(values: torch.Tensor, *, levels: int) -> torch.Tensor:
    """Packs int8 `values` between -levels and levels, shape (4 n,), in place. Returns them as int32, shape (n,)."""
    words = values.view(torch.int32)
    # uint8 arithmetic wraps: -3 is 253, and 253 + 5 is 2.
    values.view(torch.uint8).add_(levels)
    return words.sub_(levels * ONES)


def unpack(words: torch.Tensor, *, levels: int, num_ranks: int) -> torch.Tensor:
    """Unpacks `words`, which were summed over `num_ranks` ranks, in place. Returns the sums as int8, shape (4 n,)."""
    words.add_(num_ranks * levels * ONES)
    return words.view(torch.uint8).sub_(num_ranks * levels).view(torch.int8)


LARGEST = 127
SCALE_BITS = 32
# Votes: not finite; more than FAR times the range; more than the range; more than half of it.
VOTES = 4
HEADER = SCALE_BITS + VOTES
FAR = 4.0
STEP = 1.25  # factor by which a range grows or shrinks per step
# Ranges are 2^SMALLEST to 2^HIGHEST; values outside are sent in full precision. Such a message begins with one element
# per quarter of an octave, one for smaller and one for larger magnitudes: each rank sets the element of its largest
# magnitude to 1.
SMALLEST, HIGHEST, QUARTERS = -100, 120, 4
FULL_HEADER = QUARTERS * (HIGHEST - SMALLEST) + 2


@dataclass(frozen=True, slots=True)
class _Sent:
    """Context that `compress` passes to `decompress`. scale: size of one level; None if full precision was sent."""

    name: str
    gradient: torch.Tensor
    scale: float | None


@final
class Int8Compression:
    """Sends one byte per value and 36 bytes per parameter. Needs op=hvd.Sum; the result is the mean over `num_ranks`.

    Each parameter has a range, the same on all ranks. Values beyond it are clipped; clipping and rounding errors are
    fed back into the next step. With N ranks there are 127 // N levels on each side of zero, so that no sum of N
    values exceeds 8 bits. All ranks adapt the range alike: in front of its levels each rank sends votes on whether the
    range was too small or too large for its values. A parameter whose range is unknown, or far too small, is sent in
    full precision once; the summed header of that message shows the largest magnitude on any rank.

    A message is HEADER int8 values and the levels, four per int32. The first 32 values of the header are the bits of
    the float32 scale: from their sums every rank verifies that all ranks used the same scale, and that Horovod summed
    rather than averaged.

    The mean is bitwise equal on every rank, whatever the order of summing. If a rank's gradient is not finite, the
    result is NaN on every rank. More ranks mean fewer levels: with more than 16 ranks (7 levels on each side)
    Compression.fp16 is the better choice; 127 ranks are the limit.
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
        """See `HvdCompression.state_dict`. The state holds the residuals of this rank, and `ranges`.

        `ranges` maps the name of a parameter to the largest magnitude that int8 represents, the same on all ranks.
        """
        return {"kind": "int8", "ranges": dict(self._ranges), **self._residuals.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "int8":
            raise UsageError(f"this is the state of {state.get('kind')!r} compression, not of int8")
        self._residuals.load_state_dict(state)
        self._ranges = dict(state["ranges"])


def _place(largest: float) -> int:
    """Returns the index that stands for the magnitude `largest` in the header of a full-precision message."""
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


# Limit of the sum of the ranks' values: half of float16's range, as each addition may round up.
SAFE_SUM = 2.0**15


class HvdCompression(Protocol):
    """Interface of a compression: the methods that hvd.DistributedOptimizer calls, and the state for checkpoints."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state: tensors, numbers and text. Each rank must save its own state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores this rank's state.

        Args:
            state: What `state_dict` returned. If it was saved with another number of ranks, the residuals start at
                zero, with a warning.

        Raises:
            UsageError: The state belongs to another compression or model.
        """


@final
class Compression:
    """Creates gradient compressions for hvd.DistributedOptimizer.

    Use each compression for one optimizer only. Both kinds keep each rank's rounding errors and add them to its next
    gradient (error feedback, Seide et al. 2014, doi:10.21437/Interspeech.2014-274): save `state_dict()` along with the
    optimizer's state.
    """

    @staticmethod
    def fp16(
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        num_ranks: int,
        scale: float = 1.0,
        error_feedback: bool = True,
    ) -> HvdCompression:
        """Returns a compression that sends float16: half the bytes of float32.

        With error feedback nothing overflows: the part of a value that is too large for the sum is kept for the next
        step.

        Args:
            named_parameters: `model.named_parameters()`. Gradients have any shape, float32.
            num_ranks: `hvd.size()`.
            scale: Factor on the gradients before they are rounded to float16; they are divided by it afterwards.
            error_feedback: True to keep rounding errors for the next step.

        Raises:
            UsageError: An argument is invalid.
        """
        return Fp16Compression(
            named_parameters, num_ranks=num_ranks, scale=scale, error_feedback=error_feedback
        )

    @staticmethod
    def int8(named_parameters: Iterable[tuple[str, torch.Tensor]], *, num_ranks: int) -> HvdCompression:
        """Returns a compression that sends one byte per value: a quarter of the bytes of float32.

        It needs `op=hvd.Sum`; the resulting gradients are the mean over the ranks. With more than 16 ranks, `fp16` is
        the better choice; 127 ranks are the limit.

        Args:
            named_parameters: `model.named_parameters()`. Gradients have any shape, float32.
            num_ranks: `hvd.size()`.

        Raises:
            UsageError: An argument is invalid.
        """
        return Int8Compression(named_parameters, num_ranks=num_ranks)

    @staticmethod
    def bf16(*_: object, **__: object) -> NoReturn:
        """Raises UsageError: Horovod cannot sum bfloat16."""
        raise UsageError(
            "Horovod 0.28.1 cannot sum bfloat16, and as float32 it would save nothing: use Compression.fp16, "
            "which has the same size. hpctrain's own updater sends bfloat16 over Horovod: "
            "session.distributed_optimizer(model, optimizer, wire='bf16')"
        )


@final
class Fp16Compression:
    """Sends float16. Works with op=hvd.Average and hvd.Sum, groups and gradient_predivide_factor.

    Without error feedback, values above 65504 / scale become inf. Rounding by Horovod's own sum is not fed back. A
    gradient that is not finite stays so, and leaves the residual unchanged.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        num_ranks: int,
        scale: float,
        error_feedback: bool,
    ) -> None:
        if num_ranks < 1:
            raise UsageError(f"num_ranks is {num_ranks}: give hvd.size()")
        if not (scale > 0 and math.isfinite(scale)):
            raise UsageError(f"scale is {scale}: give a finite number above 0, such as 1024")
        self._scale = scale
        self._limit = SAFE_SUM / num_ranks
        self._owners = GradientOwners(named_parameters)
        self._residuals = HvdResiduals(self._owners, num_ranks=num_ranks) if error_feedback else None

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._residuals is None:
            return (tensor.to(_at_least_float32(tensor)) * self._scale).to(torch.float16).contiguous(), tensor
        name = self._owners.owner_of(tensor)
        value = self._residuals.added_to(tensor, name=name)
        scaled = value * self._scale
        if math.isnan(largest_magnitude(scaled)):
            return scaled.to(torch.float16), tensor
        sent = scaled.clamp_(-self._limit, self._limit).to(torch.float16)
        self._residuals.keep(value.sub_(sent.to(value.dtype).div_(self._scale)), name=name)
        return sent, tensor

    def decompress(self, tensor: torch.Tensor, ctx: torch.Tensor | None) -> torch.Tensor:
        if ctx is None:
            return tensor  # a sparse gradient, which Horovod gathers without `compress`
        decoded = tensor.to(_at_least_float32(ctx)).div_(self._scale)
        return decoded.to(ctx.dtype).view(ctx.shape)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fp16", **({} if self._residuals is None else self._residuals.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "fp16":
            raise UsageError(f"this is the state of {state.get('kind')!r} compression, not of fp16")
        if self._residuals is not None:
            self._residuals.load_state_dict(state)


def _at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
