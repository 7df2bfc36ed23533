"""Permutation tests of several figures at once: which of them are lower in the second group than noise explains.

Under the hypothesis that nothing changed, the labels of the measurements may be exchanged. Where the two groups were
measured in turns, the two values of a round may be exchanged, which flips the sign of the difference; else all values
may be dealt anew to the two groups. A round's labels are exchanged for all figures together, so figures may depend on
each other. The p of a figure is the share of arrangements whose largest statistic of ANY figure reaches that of this
figure: the probability of one false alarm among all figures is at most the chosen level.

Source: Westfall and Young 1993, Resampling-Based Multiple Testing, the single-step maxT procedure; for the random
arrangements Phipson and Smyth 2010, doi:10.2202/1544-6115.1585.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALL_UP_TO = 200_000
DRAWS = 20_000
# Arrangements that are equal but for rounding count as reached.
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class PermutationTest:
    """p: of each figure, adjusted for all of them. arrangements: number that were evaluated, the actual one among them.
    exact: whether these are all there are; else they were drawn at random. least_p: the smallest p that is possible."""

    p: tuple[float, ...]
    arrangements: int
    exact: bool

    @property
    def least_p(self) -> float:
        return 1 / self.arrangements


def paired_decrease(differences: NDArray[np.float64], *, seed: int = 0) -> PermutationTest:
    """Tests whether the mean of each column is below zero by more than noise.

    differences: shape (rounds, figures), second minus first value of a round. All 2^rounds signs are enumerated up to
    `ALL_UP_TO`; beyond that `DRAWS` are drawn with `seed`. With five rounds no p is below 1/32.
    """
    rounds = len(differences)
    exact = 2**rounds <= ALL_UP_TO
    if exact:
        bits = np.arange(2**rounds)[:, None] >> np.arange(rounds)[None, :]
        signs = 1.0 - 2.0 * (bits & 1)
    else:
        drawn = np.random.default_rng(seed).choice([-1.0, 1.0], size=(DRAWS, rounds))
        signs = np.concatenate([np.ones((1, rounds)), drawn])
    means = signs @ differences / rounds
    squares = (differences**2).sum(axis=0)  # the same for all signs
    variances = np.maximum(squares - rounds * means**2, 1e-12 * squares + 1e-300) / (rounds - 1)
    return _adjusted(-means / np.sqrt(variances / rounds), exact=exact)


def unpaired_decrease(
    first: NDArray[np.float64], second: NDArray[np.float64], *, seed: int = 0
) -> PermutationTest:
    """Tests whether the mean of each column is lower in `second` than in `first` by more than noise.

    first, second: shapes (rounds, figures); the numbers of rounds may differ. All ways to deal the rounds to two groups
    are enumerated up to `ALL_UP_TO`; beyond that `DRAWS` are drawn with `seed`. With five rounds in each group no p is
    below 1/252, with three 1/20.
    """
    values = np.concatenate([first, second])
    total, taken = len(values), len(second)
    exact = math.comb(total, taken) <= ALL_UP_TO
    if exact:
        chosen = np.array(list(itertools.combinations(range(total - 1, -1, -1), taken)), dtype=np.intp)
    else:
        generator = np.random.default_rng(seed)
        drawn = [generator.permutation(total)[:taken] for _ in range(DRAWS)]
        chosen = np.array([np.arange(total - taken, total), *drawn], dtype=np.intp)
    inside = np.zeros((len(chosen), total))
    np.put_along_axis(inside, chosen, 1.0, axis=1)
    centred = values - values.mean(axis=0)  # loses fewer digits in the sums of squares
    means, errors = [], []
    for weights, count in ((1 - inside, total - taken), (inside, taken)):
        mean = weights @ centred / count
        deviations = np.maximum(weights @ centred**2 - count * mean**2, 0.0)
        means.append(mean)
        errors.append(deviations / (count - 1) / count)
    scale = (centred**2).sum(axis=0)
    statistic = (means[0] - means[1]) / np.sqrt(errors[0] + errors[1] + 1e-12 * scale + 1e-300)
    return _adjusted(statistic, exact=exact)


def _adjusted(statistic: NDArray[np.float64], *, exact: bool) -> PermutationTest:
    """statistic: shape (arrangements, figures), the actual arrangement first; large values: lower in the second."""
    largest = statistic.max(axis=1)
    actual = statistic[0]
    reached = largest[:, None] >= actual[None, :] - _TOLERANCE * np.abs(actual)[None, :]
    return PermutationTest(
        p=tuple(float(share) for share in reached.mean(axis=0)), arrangements=len(statistic), exact=exact
    )
