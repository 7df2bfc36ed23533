"""Compression for people who keep their own Horovod script: for hvd.DistributedOptimizer(compression=...).

Horovod calls `compress(p.grad)` when a gradient is ready, sums what that returns over the ranks by its own
operation, and makes what `decompress` returns the gradient. So whatever travels must be summed by addition of
its own dtype, which decides what can be offered here: float16, and integers of 8 bits on a scale that all
ranks know beforehand (`int8.py`). Low-rank compression needs two sums that depend on each other, and
bfloat16 is no type that Horovod carries; both are wires of hpctrain's own updater. Horovod is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol, final

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.horovod_compression.error_feedback import HvdResiduals, largest_magnitude
from hpctrain.reduce.horovod_compression.int8 import Int8Compression
from hpctrain.reduce.horovod_compression.parameter_lookup import GradientOwners

# What the ranks' values may add up to. Half of the range of float16: each addition may round up.
SAFE_SUM = 2.0**15


class HvdCompression(Protocol):
    """What hvd.DistributedOptimizer calls, and what a checkpoint of the user's needs."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, of tensors, numbers and text: each rank saves its own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. From another number of ranks: residuals begin at zero, with a warning."""


@final
class Compression:
    """Makes a compression. named_parameters: `model.named_parameters()`; num_ranks: `hvd.size()`.

    One object belongs to one optimizer. Both kinds keep each rank's rounding errors and add them to its next
    gradient (error feedback, Seide et al. 2014, doi:10.21437/Interspeech.2014-274): save `state_dict()` with
    the optimizer's.
    """

    @staticmethod
    def fp16(
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        num_ranks: int,
        scale: float = 1.0,
        error_feedback: bool = True,
    ) -> HvdCompression:
        """Half the bytes. `scale` multiplies gradients before they are rounded, and is divided out after.

        With error feedback nothing overflows: what is too large for the sum is kept back for the next step.
        """
        return Fp16Compression(
            named_parameters, num_ranks=num_ranks, scale=scale, error_feedback=error_feedback
        )

    @staticmethod
    def int8(named_parameters: Iterable[tuple[str, torch.Tensor]], *, num_ranks: int) -> HvdCompression:
        """A quarter of the bytes. Needs `op=hvd.Sum`; gradients come out as the mean over the ranks."""
        return Int8Compression(named_parameters, num_ranks=num_ranks)

    @staticmethod
    def bf16(*_: object, **__: object) -> NoReturn:
        """Refused: Horovod cannot carry it."""
        raise UsageError(
            "Horovod 0.28.1 cannot sum bfloat16, and as float32 it would save nothing: take Compression.fp16, "
            "which is as small. hpctrain's own updater carries bfloat16 over Horovod: "
            "session.updater(model, optimizer, wire='bf16')"
        )


@final
class Fp16Compression:
    """float16 on the wire. Works with op=hvd.Average and hvd.Sum, groups and gradient_predivide_factor.

    Without error feedback values above 65504 / scale become inf. What Horovod itself rounds while it sums is
    not fed back. Gradients that are not finite come out not finite, and leave the residual as it was.
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
            return tensor  # a sparse gradient, which Horovod gathers without asking us
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
