"""What a gradient looks like on the wire."""

from __future__ import annotations

from enum import Enum

import torch


class WireFormat(Enum):
    """`FP32` sends a gradient in its own precision (float64 stays float64); `FP16` sends two bytes each.

    With FP16 the gradients are scaled before the cast (see `scale.LossScale`), and a step in which any of
    them left the range of float16 is skipped on all ranks.
    """

    FP32 = "fp32"
    FP16 = "fp16"

    def dtype_for(self, gradient: torch.dtype) -> torch.dtype:
        """dtype of the buffer that carries gradients of dtype `gradient`."""
        if self is WireFormat.FP16 and gradient.is_floating_point:
            return torch.float16
        return gradient
