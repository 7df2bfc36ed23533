"""Measures by how much two tensors differ, chunk by chunk. Pure functions."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch

from hpctrain.checkpoint.format.dtypes import byte_view

_CHUNK_ELEMS = 1 << 16  # 512 KiB as float64: the few arrays of one chunk stay in the cache
_BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How much an element may differ: b differs from a if |b - a| > absolute + relative * |a|.

    If both numbers are 0, the default, an element differs if any of its bits does.

    Attributes:
        absolute: Absolute tolerance, at least 0.
        relative: Tolerance relative to the element of the first tensor, at least 0.
    """

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.absolute == 0 and self.relative == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much two tensors, or two regions of them, differ. Amounts of several regions can be added.

    Attributes:
        num_elems: Number of compared elements.
        num_different: Number of elements whose bits differ; if the two dtypes differ, number of elements whose
            values differ.
        num_beyond: Number of elements that differ by more than the tolerance of the comparison.
        num_not_finite: Number of elements whose difference is not finite; `max_abs` and `squares` leave such elements
            out.
        max_abs: Largest absolute difference.
        squares: Sum of the squared differences.
        squares_of_first: Sum of the squares of the first tensor's finite elements.
    """

    num_elems: int = 0
    num_different: int = 0
    num_beyond: int = 0
    num_not_finite: int = 0
    max_abs: float = 0.0
    squares: float = 0.0
    squares_of_first: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            num_elems=self.num_elems + other.num_elems,
            num_different=self.num_different + other.num_different,
            num_beyond=self.num_beyond + other.num_beyond,
            num_not_finite=self.num_not_finite + other.num_not_finite,
            max_abs=max(self.max_abs, other.max_abs),
            squares=self.squares + other.squares,
            squares_of_first=self.squares_of_first + other.squares_of_first,
        )

    @property
    def relative(self) -> float | None:
        """L2 norm of the difference, divided by the L2 norm of the first tensor.

        None if the first tensor's norm is 0, or if one of the two norms is not finite.
        """
        if self.squares_of_first == 0 or not math.isfinite(self.squares + self.squares_of_first):
            return None
        return math.sqrt(self.squares / self.squares_of_first)


def amount_of(first: torch.Tensor, second: torch.Tensor, *, tolerance: Tolerance) -> Amount:
    """Returns by how much two CPU tensors of the same shape differ. The tensors may have different dtypes."""
    one, two = first.reshape(-1), second.reshape(-1)
    total = Amount()
    for start in range(0, one.numel(), _CHUNK_ELEMS):
        chunk = slice(start, start + _CHUNK_ELEMS)
        total += _amount_of_chunk(one[chunk], two[chunk], tolerance=tolerance)
    return total


def _amount_of_chunk(first: torch.Tensor, second: torch.Tensor, *, tolerance: Tolerance) -> Amount:
    values, others = _values(first), _values(second)
    if first.dtype == second.dtype:
        different = _different_bits(first, second)
    elif values is None or others is None:
        different = torch.ones(first.numel(), dtype=torch.bool)
    else:
        different = (values != others) & ~(values.isnan() & others.isnan())
    num_different = int(different.sum())
    if values is None or others is None:
        return Amount(num_elems=first.numel(), num_different=num_different, num_beyond=num_different)
    sizes, differences = values.abs(), (others - values).abs()
    squares, squares_of_first = float(differences.square().sum()), float(sizes.square().sum())
    finite: torch.Tensor | None = None
    if not math.isfinite(squares + squares_of_first):  # rare and slow: leave out infinities and NaN
        differences = torch.where(different, differences, 0)  # a NaN in both tensors is not a difference
        finite = differences.isfinite()
        squares = float(differences[finite].square().sum())
        squares_of_first = float(sizes[sizes.isfinite()].square().sum())
    beyond = different
    if not tolerance.is_exact:
        beyond = different & ~(differences <= tolerance.absolute + tolerance.relative * sizes)
    counted = differences if finite is None else differences[finite]
    return Amount(
        num_elems=first.numel(),
        num_different=num_different,
        num_beyond=int(beyond.sum()),
        num_not_finite=0 if finite is None else int((~finite).sum()),
        max_abs=float(counted.max()) if counted.numel() else 0.0,
        squares=squares,
        squares_of_first=squares_of_first,
    )


def _different_bits(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns for each element whether its bits differ: bool, shape (num_elems,)."""
    width = first.element_size()
    bits = _BITS.get(width, torch.int64)  # two words for complex128
    one, two = (byte_view(tensor).view(bits).reshape(-1, max(1, width // 8)) for tensor in (first, second))
    return (one != two).any(dim=1)


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the elements as float64 or complex128, shape (num_elems,); None if torch cannot convert the dtype."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that complex32 is experimental
            return tensor.to(wide)
    except (RuntimeError, NotImplementedError):
        return None
