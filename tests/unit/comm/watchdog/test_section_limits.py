"""Limits of the sections of a run: what follows from measured times, and which one applies where."""

from __future__ import annotations

from hypothesis import given, strategies as st

from hpctrain.comm.collectives.activity import Section
from hpctrain.comm.watchdog.section_limits import (
    FACTOR,
    RULES,
    LimitSettings,
    RecentMaximum,
    SectionLimits,
    derive_limit,
)

SECONDS = st.floats(min_value=1e-6, max_value=1e5)
SETTINGS = LimitSettings(timeout_s=600.0)


@given(st.lists(SECONDS, max_size=60), st.integers(1, 12), SECONDS)
def test_the_maximum_covers_at_least_a_window_and_says_of_how_many_it_is(
    values: list[float], window: int, before: float
) -> None:
    found = RecentMaximum(window, before=before)
    for number, value in enumerate(values, start=1):
        found.add(value)
        covered = values[number - found.num_covered : number]
        assert found.num_covered >= min(number, window)
        assert found.num_covered <= 2 * window
        earlier = [before] if number <= window else []
        assert found.largest == max([*covered, *earlier])


@given(st.sampled_from(list(Section)), SECONDS, st.integers(0, 2000), SECONDS, SECONDS, st.booleans())
def test_a_derived_limit_is_far_above_what_was_measured_and_earlier_than_the_runs_own(
    section: Section, slowest_s: float, num: int, least_s: float, timeout_s: float, configured: bool
) -> None:
    given_s = {section: 7.0} if configured else {}
    settings = LimitSettings(timeout_s=timeout_s, least_s=least_s, configured=given_s)
    limit = derive_limit(section, slowest_s=slowest_s, num_measured=num, settings=settings)
    if limit is None:
        rule = RULES.get(section)
        assert (
            rule is None
            or configured
            or num < rule.least_measured
            or max(FACTOR * slowest_s, rule.least_factor * least_s) >= timeout_s
        )
        return
    assert not configured
    assert section not in (Section.START, Section.LOAD)
    assert FACTOR * slowest_s <= limit.seconds < timeout_s
    assert limit.seconds >= least_s
    assert settings.limit_s(section) == timeout_s
    switched_off = LimitSettings(timeout_s=timeout_s, least_s=least_s, derive=False)
    assert derive_limit(section, slowest_s=slowest_s, num_measured=num, settings=switched_off) is None


def test_the_message_says_from_what_a_limit_follows() -> None:
    slow = derive_limit(Section.STEP, slowest_s=8.0, num_measured=812, settings=SETTINGS)
    assert slow is not None
    assert slow.text == "limit of a step 80 s = 10 x the slowest of the last 812, 8 s"
    short = derive_limit(Section.STEP, slowest_s=0.25, num_measured=20, settings=SETTINGS)
    assert short is not None
    assert short.text == (
        "limit of a step 60 s, the minimum by limits.least_s; 10 x the slowest of the last 20, 0.25 s, is less"
    )


def measured(settings: LimitSettings = SETTINGS) -> SectionLimits:
    """After 20 steps of up to 10 s and two saves of up to 40 s, in the midst of training."""
    limits = SectionLimits(settings)
    for number in range(20):
        limits.measure(Section.STEP, 10.0 if number == 3 else 1.0)
        limits.measure(Section.INPUT, 0.1)
    for seconds in (40.0, 2.0):
        limits.measure(Section.SAVE, seconds)
    for _ in range(3):
        train_step(limits)
    return limits


def train_step(limits: SectionLimits, *, then: Section | None | str = "nothing") -> None:
    """As the loop of training: a batch, a step, and in it perhaps something in another section."""
    with limits.enter(Section.INPUT):
        pass
    with limits.enter(Section.STEP):
        if then != "nothing":
            with limits.enter(then):  # type: ignore[arg-type]
                pass


def early_s(limits: SectionLimits) -> float | None:
    return None if limits.early is None else limits.early.seconds


def test_the_innermost_section_counts() -> None:
    limits = measured()
    with limits.enter(Section.STEP):
        assert early_s(limits) == 100.0
        with limits.enter(Section.SAVE):
            assert (limits.now, early_s(limits)) == (Section.SAVE, 400.0)
        assert (limits.now, early_s(limits)) == (Section.STEP, 100.0)
        with limits.enter(None):  # an evaluation
            assert early_s(limits) is None
    assert limits.now is None


def test_where_a_late_rank_may_still_be_in_no_section_the_runs_own_limit_applies() -> None:
    """In the step with an evaluation or a roll-back and the one after it, and in the first one of an epoch."""
    for other in (None, Section.LOAD):
        limits = measured()
        train_step(limits, then=other)
        for expected in (None, 100.0):
            with limits.enter(Section.STEP):
                assert early_s(limits) == expected
    train_step(limits, then=Section.SAVE)
    with limits.enter(Section.STEP):
        assert early_s(limits) == 100.0
    with limits.enter(None):
        pass
    for expected in (None, 100.0):
        with limits.enter(Section.STEP):
            assert early_s(limits) == expected


def test_a_rank_whose_section_is_not_known_has_the_time_of_all_it_may_be_in() -> None:
    limits = measured()
    with limits.enter(Section.STEP):
        assert limits.early_s_of(Section.STEP) == 100.0
        assert limits.early_s_of(Section.INPUT) == 300.0
        assert limits.early_s_of(Section.SAVE) == 400.0
        assert limits.early_s_of(Section.LOAD) is None
        assert limits.early_s_of(None) is None
        assert limits.early_everywhere_s == 300.0
        with limits.enter(Section.SAVE):
            pass
        assert limits.early_everywhere_s == 400.0


def test_nothing_is_derived_before_enough_was_measured_and_earlier_attempts_only_raise_limits() -> None:
    limits = SectionLimits(SETTINGS)
    limits.count_earlier({"step": 20.0, "unknown": 1.0})
    for _ in range(19):
        limits.measure(Section.STEP, 0.1)
        assert limits.derived(Section.STEP) is None
    limits.measure(Section.STEP, 0.1)
    derived = limits.derived(Section.STEP)
    assert derived is not None
    assert derived.seconds == 200.0
    for _ in range(1000):
        limits.measure(Section.STEP, 0.1)
    derived = limits.derived(Section.STEP)
    assert derived is not None
    assert derived.seconds == 60.0
    again = SectionLimits(SETTINGS)
    again.count_earlier({"step": 0.001})
    assert again.derived(Section.STEP) is None


def test_configured_limits_replace_the_runs_own_and_what_is_derived() -> None:
    limits = measured(LimitSettings(timeout_s=600.0, configured={Section.STEP: 8.0, Section.SAVE: 3600.0}))
    assert (limits.limit_s, limits.wait_limit_s) == (600.0, 595.0)
    with limits.enter(Section.STEP):
        assert (limits.limit_s, limits.wait_limit_s, limits.ending_s) == (8.0, 6.0, 2.0)
        assert limits.early is None
        assert limits.first_limit_s == 6.0
        with limits.enter(Section.SAVE):
            assert limits.wait_limit_s == 3595.0
    limits.base = Section.START
    assert limits.limit_s == 600.0
    assert limits.record()["save"] == {
        "limit_s": 3600.0, "derived_s": None, "slowest_s": 40.0, "measured": 2,
    }  # fmt: skip
    assert limits.record()["start"] == {
        "limit_s": 600.0, "derived_s": None, "slowest_s": None, "measured": None,
    }  # fmt: skip
