"""Trials during computation, for ranks that outnumber their cores.

A bucket that is reduced during backward prolongs a step by what it takes of the scarcer of two resources. The link
between the nodes needs L seconds for its bytes (`link_bound.py`), during which the cores compute. The cores need C
seconds for the ranks' backward and P seconds for the reduction: sums, casts, messages, and polls while a rank waits
for others. With a core for each rank, what binds is how long the reduction takes by itself. Where ranks outnumber the
cores, another rank computes while one waits, so the step takes max(L, C + P). C is not known when the reduction is
chosen, and is the same for all candidates: they are compared by max(L, P).

P cannot be taken from a reduction that runs by itself: it polls as often as an idle core allows, and all ranks arrive
at once. So a trial is a small step: each rank computes, starts the reduction on a thread as training does, computes
on, and waits for it. P is the time of the slowest rank less that of the same computation without a reduction. Waiting
that the computation does not hide is part of it, as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

# Side of the square matrices of one product: about half a millisecond of a core, as one operation of a small model.
SIDE = 224
UNITS_TO_TIME = 6
# Least time of a trial's computation: several time slices of the kernel's scheduler, so that ranks of one core
# arrive one after another, as they do in training.
LEAST_LOAD_S = 8e-3


# Computes a number of units, all of the same duration, on the calling thread.
Compute = Callable[[int], object]


@final
class MatrixProducts:
    """Products of two matrices of this object; a unit is one product."""

    def __init__(self) -> None:
        self._factors = torch.full((2, SIDE, SIDE), 0.5)
        self._product = torch.empty(SIDE, SIDE)

    def __call__(self, units: int) -> None:
        for _ in range(units):
            torch.mm(self._factors[0], self._factors[1], out=self._product)


@final
class ComputeLoad:
    """Computation of a known duration. The constructor is collective.

    unit_s: seconds of one unit of `compute` while all ranks compute, the same on every rank. largest: returns the
    largest of the ranks' values; collective.
    """

    def __init__(
        self, compute: Compute, *, largest: Callable[[float], float], clock: Callable[[], float]
    ) -> None:
        self.compute = compute
        compute(UNITS_TO_TIME)  # fills the caches
        largest(0.0)  # synchronizes the ranks
        began = clock()
        compute(UNITS_TO_TIME)
        self.unit_s = max(largest(clock() - began) / UNITS_TO_TIME, 1e-6)

    def half_units(self, seconds: float) -> int:
        """Returns the number of units that half of `seconds` takes, at least 1."""
        return max(1, round(max(seconds, LEAST_LOAD_S) / 2 / self.unit_s))
