"""Compression for plain Horovod scripts: for hvd.DistributedOptimizer(compression=...).

Horovod calls `compress(p.grad)` when a gradient is ready, sums the returned tensor over the ranks, and uses the
result of `decompress` as the gradient. So the compressed tensor must be summable by addition in its dtype. This
allows float16, and 8-bit integers with a scale that all ranks know beforehand (`int8.py`). Low-rank compression needs
two dependent sums, and Horovod does not support bfloat16; both are wire formats of hpctrain's own updater. Horovod is
not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol, final

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.horovod_compression.error_feedback import GradientOwners, HvdResiduals, largest_magnitude
from hpctrain.reduce.horovod_compression.int8 import Int8Compression

# Limit of the sum of the ranks' values: half of float16's range, as each addition may round up.
SAFE_SUM = 2.0**15


class HvdCompression(Protocol):
    """Interface of a compression: the methods that hvd.DistributedOptimizer calls, and state for checkpoints."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state (tensors, numbers and text). Each rank must save its own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. If the number of ranks differs, residuals start at zero, with a warning.

        Raises UsageError for the state of another compression or model.
        """


@final
class Compression:
    """Makes compressions. named_parameters: `model.named_parameters()`; num_ranks: `hvd.size()`.

    Use each object for one optimizer only. Both kinds keep each rank's rounding errors and add them to its next
    gradient (error feedback, Seide et al. 2014, doi:10.21437/Interspeech.2014-274): save `state_dict()` along with
    the optimizer's. UsageError for invalid arguments.
    """

    @staticmethod
    def fp16(
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        num_ranks: int,
        scale: float = 1.0,
        error_feedback: bool = True,
    ) -> HvdCompression:
        """Returns a compression that sends half the bytes. Gradients, of any shape, float32, are multiplied by `scale`
        before rounding to float16 and divided by it afterwards.

        With error feedback nothing overflows: the part that is too large for the sum is kept for the next step.
        """
        return Fp16Compression(
            named_parameters, num_ranks=num_ranks, scale=scale, error_feedback=error_feedback
        )

    @staticmethod
    def int8(named_parameters: Iterable[tuple[str, torch.Tensor]], *, num_ranks: int) -> HvdCompression:
        """Returns a compression that sends a quarter of the bytes of gradients of any shape, float32. Needs
        `op=hvd.Sum`; the resulting gradients are the mean over the ranks."""
        return Int8Compression(named_parameters, num_ranks=num_ranks)

    @staticmethod
    def bf16(*_: object, **__: object) -> NoReturn:
        """Not supported: raises UsageError, since Horovod cannot sum bfloat16."""
        raise UsageError(
            "Horovod 0.28.1 cannot sum bfloat16, and as float32 it would save nothing: use Compression.fp16, "
            "which has the same size. hpctrain's own updater sends bfloat16 over Horovod: "
            "session.distributed_optimizer(model, optimizer, wire='bf16')"
        )


@final
class Fp16Compression:
    """float16 on the wire. Works with op=hvd.Average and hvd.Sum, groups and gradient_predivide_factor.

    Without error feedback values above 65504 / scale become inf. Rounding by Horovod's own sum is not fed back.
    A gradient that is not finite stays so, and leaves the residual unchanged.
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
