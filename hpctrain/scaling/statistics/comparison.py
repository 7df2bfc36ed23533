"""Compares two measurements round by round, and finds which figures fell by more than noise explains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import variance
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.scaling.statistics.intervals import (
    LEVEL,
    RatioEstimate,
    paired_ratio,
    quantile_of_t,
    unpaired_ratio,
    welch_error,
)

# Permutation tests of several figures at once: which of them are lower in the second group than noise
# explains.
#
# Under the hypothesis that nothing changed, the labels of the measurements may be exchanged. Where the two
# groups were measured in turns, the two values of a round may be exchanged, which flips the sign of the
# difference; otherwise all values may be divided anew into two groups. A round's labels are exchanged for all
# figures together, so figures may depend on each other. The p of a figure is the share of arrangements
# whose largest statistic of ANY figure reaches that of this figure: the probability of one false alarm
# among all figures is at most the chosen level.
#
# Source: Westfall and Young 1993, Resampling-Based Multiple Testing, the single-step maxT procedure; for
# the random arrangements Phipson and Smyth 2010, doi:10.2202/1544-6115.1585.


ALL_UP_TO = 200_000
DRAWS = 20_000
# Arrangements that are equal but for rounding count as reached.
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class PermutationTest:
    """The result of a permutation test. An arrangement is one way to assign the measured values to old and new.

    Attributes:
        p: The p-value of each figure, adjusted for the number of figures.
        arrangements: The number of arrangements evaluated, including the actual one.
        exact: True if all possible arrangements were evaluated; False if arrangements were drawn at random.
        least_p: The smallest possible p-value.
    """

    p: tuple[float, ...]
    arrangements: int
    exact: bool

    @property
    def least_p(self) -> float:
        return 1 / self.arrangements


def paired_decrease(differences: NDArray[np.float64], *, seed: int = 0) -> PermutationTest:
    """Tests whether the mean of each column is below zero by more than noise.

    differences: shape (rounds, figures), the second value of a round minus the first.

    All 2^rounds combinations of signs are evaluated if there are at most `ALL_UP_TO` combinations; otherwise `DRAWS`
    combinations are drawn with `seed`. With five rounds no p-value is below 1/32.
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

    first, second: shape (rounds, figures); the numbers of rounds may differ.

    All divisions of the rounds into two groups are evaluated if there are at most `ALL_UP_TO` divisions; otherwise
    `DRAWS` divisions are drawn with `seed`. No p-value is below 1/252 with five rounds in each group, or below 1/20
    with three.
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
    """Returns the test with p-values adjusted for the number of figures.

    statistic: shape (arrangements, figures), the actual arrangement first. It is large if the values of the second
    group are lower than those of the first.
    """
    largest = statistic.max(axis=1)
    actual = statistic[0]
    reached = largest[:, None] >= actual[None, :] - _TOLERANCE * np.abs(actual)[None, :]
    return PermutationTest(
        p=tuple(float(share) for share in reached.mean(axis=0)), arrangements=len(statistic), exact=exact
    )


# Compares the figures of two measurements, round by round, and says which fell by more than noise explains.


ALL_FIGURES = "all"
ALPHA = 0.05
POWER = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureComparison:
    """The comparison of one figure. Higher values of a figure are better.

    The figure named `ALL_FIGURES` is the geometric mean of all other figures.

    Attributes:
        ratio: The ratio new / old, with its interval.
        p_fell: The one-sided p-value of a decrease, adjusted for the number of figures.
        p_rose: The one-sided p-value of an increase, adjusted for the number of figures.
        noise: The relative standard deviation of one repeat.
        detectable: The relative decrease that a comparison with this noise and number of repeats finds in 95% of cases
            (normal theory, without the adjustment for several figures).
        fell: Whether the figure fell by more than its noise and by more than the threshold.
        rose: Whether the figure rose by more than its noise and by more than the threshold.
    """

    name: str
    ratio: RatioEstimate
    p_fell: float
    p_rose: float
    noise: float
    detectable: float
    fell: bool
    rose: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The comparison of two measurements.

    Attributes:
        paired: Whether the rounds of the two measurements alternated in time.
        exact: As in `PermutationTest`.
        arrangements: As in `PermutationTest`.
        least_p: As in `PermutationTest`.
    """

    figures: tuple[FigureComparison, ...]
    paired: bool
    exact: bool
    arrangements: int
    least_p: float
    alpha: float
    threshold: float

    @property
    def fell(self) -> list[FigureComparison]:
        return [figure for figure in self.figures if figure.fell]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_rounds(
    old: Mapping[str, Sequence[float]],
    new: Mapping[str, Sequence[float]],
    *,
    paired: bool,
    threshold: float = 0.0,
    alpha: float = ALPHA,
    level: float = LEVEL,
    seed: int = 0,
) -> Comparison:
    """Compares the figures of two measurements. Higher values of a figure are better.

    Args:
        old: The first measurement: for each figure, its values in the order of the rounds.
        new: The second measurement, with the same figures. Unless `paired`, the number of rounds may differ.
        paired: Whether round r of `old` and round r of `new` belong together.
        threshold: The relative decrease that is tolerated.
        alpha: The probability of a false alarm among all figures.
        level: The confidence level of the intervals.
        seed: The seed for drawing arrangements at random.

    Raises ValueError if there are fewer than two rounds, if the figures of `old` and `new` differ, if their rounds
    cannot be paired, or if a value is not positive.
    """
    if not old or set(old) != set(new):
        raise ValueError("the two measurements have no common set of figures")
    names = sorted(old, key=list(old).index)
    first, second = (_logs(rounds, names) for rounds in (old, new))
    if paired and len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} rounds cannot be paired")
    if len(names) > 1:
        names = [*names, ALL_FIGURES]
        first, second = (np.column_stack([logs, logs.mean(axis=1)]) for logs in (first, second))
    fell, rose = (_test(first, second, sign=sign, paired=paired, seed=seed) for sign in (1.0, -1.0))
    figures = tuple(
        _figure(
            name, first[:, column].tolist(), second[:, column].tolist(), paired=paired, threshold=threshold,
            alpha=alpha, level=level, p_fell=fell.p[column], p_rose=rose.p[column],
        )
        for column, name in enumerate(names)
    )  # fmt: skip
    return Comparison(
        figures=figures,
        paired=paired,
        exact=fell.exact,
        arrangements=fell.arrangements,
        least_p=fell.least_p,
        alpha=alpha,
        threshold=threshold,
    )


def _logs(rounds: Mapping[str, Sequence[float]], names: Sequence[str]) -> NDArray[np.float64]:
    """Returns the logarithms of the values, shape (rounds, figures)."""
    lengths = {len(rounds[name]) for name in names}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ValueError("every figure needs the same number of rounds, at least two")
    values = np.array([rounds[name] for name in names], dtype=np.float64).T
    if not (values > 0).all():
        raise ValueError("a rate is not positive")
    return np.log(values)


def _test(
    first: NDArray[np.float64], second: NDArray[np.float64], *, sign: float, paired: bool, seed: int
) -> PermutationTest:
    if paired:
        return paired_decrease(sign * (second - first), seed=seed)
    return unpaired_decrease(sign * first, sign * second, seed=seed)


def _figure(
    name: str,
    first: list[float],
    second: list[float],
    *,
    paired: bool,
    threshold: float,
    alpha: float,
    level: float,
    p_fell: float,
    p_rose: float,
) -> FigureComparison:
    new, old = [math.exp(value) for value in second], [math.exp(value) for value in first]
    ratio = (paired_ratio if paired else unpaired_ratio)(new, old, level=level)
    if paired:
        spread = variance([b - a for a, b in zip(first, second, strict=True)])
        error, freedom, noise = math.sqrt(spread / len(first)), float(len(first) - 1), math.sqrt(spread / 2)
    else:
        error, freedom = welch_error(first, second) or (math.inf, 1.0)
        noise = math.sqrt((variance(first) + variance(second)) / 2)
    needed = error * (quantile_of_t(1 - 2 * alpha, freedom) + quantile_of_t(2 * POWER - 1, freedom))
    return FigureComparison(
        name=name,
        ratio=ratio,
        p_fell=p_fell,
        p_rose=p_rose,
        noise=noise,
        detectable=1 - math.exp(-needed),
        fell=p_fell <= alpha and ratio.value < 1 - threshold,
        rose=p_rose <= alpha and ratio.value > 1 + threshold,
    )
