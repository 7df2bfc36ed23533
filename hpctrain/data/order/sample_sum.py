"""A short value by which to see that two runs had the same samples, however many ranks shared them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def sample_sum(indices: NDArray[np.int64]) -> int:
    """Returns the sum, modulo 2^64, of a 64-bit hash of each sample's number.

    The order does not matter, and the sums of the ranks' parts, modulo 2^64, are that of the whole batch. Different
    sets of samples have the same sum with a probability of 2^-64.
    Source of the hash: Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195 (SplitMix64).
    """
    mixed = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def add_sample_sums(parts: Iterable[str]) -> str:
    """Returns the sum of the ranks' parts as records have them: 16 hexadecimal digits."""
    return show_sample_sum(sum(int(part, 16) for part in parts))


def show_sample_sum(value: int) -> str:
    """Returns 16 hexadecimal digits: JSON readers with floating-point numbers would round 64 bits."""
    return f"{value % 2**64:016x}"
