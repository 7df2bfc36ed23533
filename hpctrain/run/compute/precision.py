"""Dtypes, autocast and loss scale for the recipe's `precision`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from hpctrain.errors import RecipeError
from hpctrain.reduce import LossScale

MODEL_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(precision: str, *, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Returns a context manager factory for forward. Raises RecipeError if the device does not support `precision`."""
    dtype = AUTOCAST_DTYPE.get(precision)
    if dtype is None:
        return nullcontext
    if device.type == "cuda" and dtype is torch.bfloat16 and not _has_bf16(device):
        raise RecipeError("run.precision = 'bf16': this GPU has no bfloat16 arithmetic; use 'fp16'")
    return lambda: torch.autocast(device.type, dtype=dtype)


def _has_bf16(device: torch.device) -> bool:
    """True if the GPU computes in bfloat16 in hardware.

    `torch.cuda.is_bf16_supported` is also true (from torch 2.4 on) if bfloat16 is emulated, which is slower than
    float32, and it checks the current device only.
    """
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def loss_scale_for(precision: str, *, wire: str, max_skipped_in_row: int) -> LossScale:
    """Returns a dynamic loss scale for float16, in forward or on the wire, else a constant one of 1."""
    if precision == "fp16":
        return LossScale(value=2.0**16, dynamic=True, max_skipped_in_row=max_skipped_in_row)
    if wire == "fp16":
        return LossScale(value=2.0**10, dynamic=True, max_skipped_in_row=max_skipped_in_row)
    return LossScale(max_skipped_in_row=max_skipped_in_row)
