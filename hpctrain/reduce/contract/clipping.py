"""Clipping of gradients by their global norm, by the formula of `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

from hpctrain.errors import UsageError

_ADDED_TO_NORM = 1e-6  # as torch does


def check_clip_norm(clip_norm: float | None) -> None:
    """Raises UsageError for a `clip_norm` that is not above 0; None: gradients are not clipped."""
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"clip_norm is {clip_norm}: give a number above 0, or None for no clipping")


def clip_factor(norm: float, *, clip_norm: float | None) -> float:
    """Returns the factor of gradients whose global 2-norm is `norm`: clip_norm / (norm + 1e-6), at most 1."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + _ADDED_TO_NORM))
