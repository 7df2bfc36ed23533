"""Values, lengths and places of ranks with which the cases of a collective are tried."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)
EPSILON = {torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
LAYOUTS = {
    1: (["a"],),
    2: (["a", "a"], ["a", "b"]),
    3: (["a", "a", "a"], ["a", "b", "c"], ["a", "a", "b"], ["a", "b", "a"]),
    4: (
        ["a", "a", "b", "b"],
        ["a", "b", "a", "b"],
        ["a", "a", "a", "b"],
        ["a", "b", "b", "b"],
        ["a", "b", "b", "c"],
        ["a", "b", "b", "a"],  # the second rank of node a comes after the second of node b
    ),
}


def lengths(num_ranks: int) -> Sequence[int]:
    """Empty, shorter than the number of ranks, not divisible by it, longer."""
    return (0, 1, max(1, num_ranks - 1), num_ranks, 2 * num_ranks + 1, 1000)


def values_of(rank: int, *, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, other ones on each rank: their sums are exact in every dtype."""
    return ((torch.arange(length) * (rank + 1) + rank) % 7).to(dtype)


def random_of(rank: int, *, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def expect_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, f"{found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert torch.equal(found, expected), f"{found.tolist()[:8]}, expected {expected.tolist()[:8]}"
