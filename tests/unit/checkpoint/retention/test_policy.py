"""Which checkpoints stay: the last, every n-th, the best; never none, and never by what is not proven."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from hpctrain.checkpoint.retention.policy import Best, Retention, steps_to_delete
from hpctrain.errors import UsageError

LOSS = Best(metric="loss", mode="min")
STEPS = range(10, 101, 10)


def test_the_last_ones_stay() -> None:
    assert steps_to_delete(STEPS, saved=100, keep=3) == [10, 20, 30, 40, 50, 60, 70]
    assert steps_to_delete(STEPS, saved=100, keep=Retention(last=20)) == []
    assert steps_to_delete(STEPS, saved=100, keep=None) == []


def test_every_nth_stays_besides() -> None:
    keep = Retention(last=2, every_steps=40)
    assert steps_to_delete(STEPS, saved=100, keep=keep) == [10, 20, 30, 50, 60, 70]


def test_the_best_stays_besides_and_only_one() -> None:
    quality = {10: 3.0, 20: 0.5, 30: 0.7, 90: 0.9}
    keep = Retention(last=1, best=LOSS)
    assert steps_to_delete(STEPS, saved=100, keep=keep, quality=quality) == [10, *range(30, 100, 10)]
    most = Retention(last=1, best=Best(metric="loss", mode="max"))
    assert steps_to_delete(STEPS, saved=100, keep=most, quality=quality) == list(range(20, 100, 10))


def test_a_metric_that_is_not_a_number_is_never_the_best() -> None:
    keep = Retention(last=1, best=LOSS)
    assert steps_to_delete([10, 20, 30], saved=30, keep=keep, quality={10: math.nan, 20: 9.0}) == [10]
    assert steps_to_delete([10, 20, 30], saved=30, keep=keep, quality={10: math.nan}) == [10, 20]


def test_of_equally_good_ones_the_oldest_stays() -> None:
    keep = Retention(last=1, best=LOSS)
    assert steps_to_delete([10, 20, 30], saved=30, keep=keep, quality={10: 1.0, 20: 1.0}) == [20]


def test_later_steps_than_the_saved_one_are_neither_counted_nor_deleted() -> None:
    keep = Retention(last=2, best=LOSS)
    found = steps_to_delete([10, 20, 30, 80, 90], saved=30, keep=keep, quality={10: 1.0, 90: 0.1})
    assert found == []  # 10 is the best of those up to 30
    assert steps_to_delete([10, 20, 30, 80, 90], saved=30, keep=2) == [10]


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.integers(0, 50), min_size=1),
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 9),
    quality=st.dictionaries(st.integers(0, 50), st.floats()),
    mode=st.sampled_from(["min", "max"]),
    data=st.data(),
)
def test_the_saved_one_and_the_last_ones_before_it_always_stay(
    steps: list[int], last: int, every: int | None, quality: dict[int, float], mode: str, data: st.DataObject
) -> None:
    saved = data.draw(st.sampled_from(steps))
    keep = Retention(last=last, every_steps=every, best=Best.parse(f"loss:{mode}"))
    gone = steps_to_delete(steps, saved=saved, keep=keep, quality=quality)
    assert set(gone) <= set(steps)
    assert saved not in gone
    past = sorted({step for step in steps if step <= saved})
    assert not set(gone) & set(past[-last:])
    assert all(step < saved for step in gone)
    assert every is None or all(step % every for step in gone)
    # At most one more than the rules without a metric keep, and never one fewer.
    without = steps_to_delete(steps, saved=saved, keep=Retention(last=last, every_steps=every))
    assert set(gone) <= set(without)
    assert len(without) - len(gone) <= 1


@pytest.mark.parametrize("text", ["loss", "loss:", ":min", "loss:smallest", ""])
def test_a_best_that_says_too_little_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="METRIC:min"):
        Best.parse(text)


def test_a_metric_may_have_a_colon_in_its_name() -> None:
    assert Best.parse("top:5:max") == Best(metric="top:5", mode="max")


@pytest.mark.parametrize("last", [0, -1])
def test_keeping_nothing_is_refused(last: int) -> None:
    with pytest.raises(UsageError, match="at least the newest"):
        Retention(last=last)
    with pytest.raises(UsageError, match="every_steps"):
        Retention(every_steps=last)
