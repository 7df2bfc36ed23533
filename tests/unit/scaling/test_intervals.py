"""Intervals of ratios cover the truth as often as they say, for few repeats too."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hpctrain.scaling import RatioEstimate, paired_ratio, unpaired_ratio


def covers(ratio: RatioEstimate, truth: float) -> bool:
    return ratio.low is not None and ratio.high is not None and ratio.low <= truth <= ratio.high


@pytest.mark.parametrize("repeats", [2, 3, 5, 8])
def test_paired_intervals_cover_the_ratio_in_95_of_100_sweeps(repeats: int) -> None:
    """Rounds drift by 30%, runs vary by 8%: what the project has measured."""
    generator = np.random.default_rng(repeats)
    drift = generator.normal(0, 0.3, size=(2000, repeats))
    noise = generator.normal(0, 0.08, size=(2, 2000, repeats))
    top, bottom = np.exp(drift + noise[0] + math.log(1.7)), np.exp(drift + noise[1])
    found = sum(covers(paired_ratio(a, b), 1.7) for a, b in zip(top, bottom, strict=True))
    # 4 standard deviations of a count of 2000 with p = 0.95.
    assert abs(found / 2000 - 0.95) < 0.02


def test_a_bootstrap_of_three_would_promise_too_much() -> None:
    """Why the intervals are not resampled: at three repeats the percentile bootstrap covers far less than it says."""
    generator = np.random.default_rng(1)
    logs = generator.normal(0, 0.08, size=(1000, 3))
    picks = generator.integers(0, 3, size=(400, 3))
    means = logs[:, picks].mean(axis=2)
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    assert ((low <= 0) & (high >= 0)).mean() < 0.85
    ours = sum(covers(paired_ratio(np.exp(one), [1.0] * 3), 1.0) for one in logs)
    assert ours / 1000 > 0.93


def test_unpaired_intervals_are_those_of_welch() -> None:
    first, second = [1.0, 1.2, 1.1, 0.9], [2.0, 2.6, 2.2]
    ratio = unpaired_ratio(second, first)
    expected = stats.ttest_ind(np.log(second), np.log(first), equal_var=False).confidence_interval(0.95)
    assert ratio.low == pytest.approx(math.exp(expected.low))
    assert ratio.high == pytest.approx(math.exp(expected.high))
    assert (ratio.count, ratio.paired, ratio.range_level) == (3, False, None)


def test_a_ratio_and_its_inverse_have_the_same_interval() -> None:
    rates, others = [10.0, 12.0, 11.0], [5.0, 5.5, 6.0]
    one, two = paired_ratio(rates, others), paired_ratio(others, rates)
    assert one.low is not None
    assert one.high is not None
    assert (two.low, two.high) == (pytest.approx(1 / one.high), pytest.approx(1 / one.low))
    assert (one.least, one.greatest) == (pytest.approx(11 / 6), pytest.approx(12 / 5.5))
    assert one.range_level == 0.75


def test_one_repeat_has_no_interval_and_no_rates_are_an_error() -> None:
    alone = paired_ratio([3.0], [2.0])
    assert (alone.value, alone.low, alone.high, alone.count) == (pytest.approx(1.5), None, None, 1)
    assert unpaired_ratio([3.0], [2.0, 2.1]).low is None
    assert covers(paired_ratio([2.0, 2.0], [1.0, 1.0]), 2.0)
    for bad in ([], [0.0], [-1.0], [math.nan], [math.inf]):
        with pytest.raises(ValueError):
            paired_ratio(bad, [1.0] * len(bad))
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])
