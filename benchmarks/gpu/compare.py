"""Compares results on the device with those on the CPU."""

from __future__ import annotations

import torch

from benchmarks.gpu.outcome import CheckFailed


def require(holds: bool, text: str) -> None:
    if not holds:
        raise CheckFailed(text)


def require_equal(found: torch.Tensor, expected: torch.Tensor, *, what: str) -> None:
    """Raises CheckFailed unless both tensors have the same shape, dtype and bits. `found` may be on the device."""
    host = found.detach().cpu()
    if host.dtype != expected.dtype or host.shape != expected.shape or not torch.equal(host, expected):
        raise CheckFailed(f"{what}: {_difference(host, expected)}")


def require_close(found: torch.Tensor, expected: torch.Tensor, *, within: float, what: str) -> float:
    """Returns the largest difference / the largest expected absolute value. Raises CheckFailed if it exceeds `within`,
    or if shape or dtype differ. `found` may be on the device."""
    host, wanted = found.detach().double().cpu(), expected.detach().double().cpu()
    if host.shape != wanted.shape:
        raise CheckFailed(f"{what}: {_difference(host, wanted)}")
    share = float((host - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)) if host.numel() else 0.0
    if not share <= within:  # true for NaN as well
        raise CheckFailed(f"{what}: differs by {share:.3g} of the largest value, more than {within:g}")
    return share


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{tuple(found.shape)} {found.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    differing = int((found != expected).sum())
    return f"{differing} of {expected.numel()} values differ from the CPU's"
