"""Permutation tests: exact where they can be, the same as scipy's, few false alarms among several figures."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from hpctrain.scaling import paired_decrease, unpaired_decrease


def test_a_paired_p_is_the_share_of_all_signs() -> None:
    generator = np.random.default_rng(3)
    differences = generator.normal(-0.05, 0.08, size=(7, 1))
    found = paired_decrease(differences)
    expected = stats.permutation_test(
        (differences[:, 0],), np.mean, permutation_type="samples", alternative="less", n_resamples=np.inf
    )
    assert found.p[0] == pytest.approx(expected.pvalue)
    assert (found.exact, found.arrangements, found.least_p) == (True, 128, 1 / 128)


def test_an_unpaired_p_is_the_share_of_all_ways_to_deal() -> None:
    generator = np.random.default_rng(4)
    first, second = generator.normal(0, 0.08, size=(5, 1)), generator.normal(-0.1, 0.08, size=(5, 1))
    found = unpaired_decrease(first, second)
    expected = stats.permutation_test(
        (second[:, 0], first[:, 0]), lambda a, b, axis: np.mean(a, axis=axis) - np.mean(b, axis=axis),
        vectorized=True, alternative="less", n_resamples=np.inf,
    )  # fmt: skip
    # Of two groups of one size Welch's t and the difference of the means order the arrangements alike.
    assert found.p[0] == pytest.approx(expected.pvalue, abs=0.01)
    assert (found.exact, found.arrangements) == (True, 252)


def test_few_rounds_cannot_give_a_small_p() -> None:
    fell = np.array([[-0.5], [-0.51], [-0.52]])
    assert paired_decrease(fell).p == (1 / 8,)
    assert unpaired_decrease(np.array([[0.5], [0.51], [0.52]]), fell).p == (1 / 20,)
    five = np.linspace(-0.5, -0.52, 5)[:, None]
    assert unpaired_decrease(-five, five).p == (1 / 252,)


def test_more_rounds_than_can_be_enumerated_are_sampled_and_say_so() -> None:
    generator = np.random.default_rng(5)
    differences = generator.normal(-0.04, 0.08, size=(20, 2))
    found = paired_decrease(differences, seed=1)
    assert not found.exact
    assert found == paired_decrease(differences, seed=1)
    expected = stats.ttest_1samp(differences[:, 0], 0, alternative="less").pvalue
    assert found.p[0] >= 0.5 * expected
    many = unpaired_decrease(generator.normal(0, 1, (12, 1)), generator.normal(0, 1, (12, 1)))
    assert not many.exact
    assert 0 < many.p[0] <= 1


def test_equal_values_are_no_decrease() -> None:
    assert paired_decrease(np.zeros((6, 2))).p == (1.0, 1.0)
    assert unpaired_decrease(np.ones((5, 2)), np.ones((5, 2))).p == (1.0, 1.0)


@pytest.mark.parametrize("paired", [True, False])
def test_among_five_figures_one_false_alarm_in_twenty(paired: bool) -> None:
    """Figures of a round depend on each other; noise has heavy tails."""
    generator = np.random.default_rng(6)
    alarms = 0
    for _ in range(600):
        common = generator.standard_t(3, size=(2, 6, 1))
        old, new = 0.05 * (common + generator.standard_t(3, size=(2, 6, 5)))
        found = paired_decrease(new - old) if paired else unpaired_decrease(old, new)
        alarms += min(found.p) <= 0.05
    # p = 0.05, and 3 standard deviations of a count of 600.
    assert alarms / 600 < 0.05 + 3 * 0.009
