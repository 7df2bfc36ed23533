"""What is chosen from measurements: pure, over measurements of any kind."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from hpctrain.errors import UsageError
from hpctrain.reduce.autotune.decision import (
    LEAST_BUCKETS,
    SMALLEST_BUCKET_BYTES,
    Choice,
    eligible,
    measurements_from_json,
    measurements_to_json,
)
from hpctrain.reduce.autotune.link_speed import Candidate, Cost, Measurement

SIZES = st.integers(1, 1 << 26)
SECONDS = st.floats(1e-7, 10)
POINTS = st.lists(st.tuples(SIZES, SECONDS), min_size=1, max_size=6)
MEASUREMENTS = st.lists(
    st.builds(
        Measurement, algorithm=st.sampled_from(["flat", "ring", "direct", "hierarchical"]),
        wire=st.sampled_from(["fp32", "fp16"]), num_bytes=SIZES, seconds=SECONDS,
    ),
    min_size=1, max_size=20,
)  # fmt: skip
ANY_SIZE = st.integers(0, 1 << 34)


def straight(algorithm: str, *, latency_s: float, per_byte_s: float, wire: str = "fp32") -> list[Measurement]:
    return [
        Measurement(algorithm=algorithm, wire=wire, num_bytes=n, seconds=latency_s + n * per_byte_s)
        for n in (1 << 12, 1 << 15, 1 << 18, 1 << 21)
    ]


@given(MEASUREMENTS, ANY_SIZE)
def test_the_choice_is_the_candidate_that_costs_least(measured: list[Measurement], size: int) -> None:
    choice = Choice.of_measurements(measured)
    least = min(choice.costs[candidate].at(size) for candidate in eligible(choice.costs, size))
    assert choice.costs[choice.choose(size)].at(size) == pytest.approx(least, rel=1e-6)


@given(MEASUREMENTS, ANY_SIZE)
def test_the_ranges_alone_say_what_is_chosen(measured: list[Measurement], size: int) -> None:
    choice = Choice.of_measurements(measured)
    again = Choice.from_ranges(json.loads(json.dumps(choice.ranges_to_json())))
    assert again.choose(size) == choice.choose(size)
    assert again.ranges_to_json() == choice.ranges_to_json()
    assert again.describe() == choice.describe()


@pytest.mark.parametrize(
    "damaged",
    [None, [], [{}], [{"from_bytes": 1, "algorithm": "a", "wire": "fp32"}], [{"from_bytes": "x"}], 7],
)
def test_other_ranges_are_refused(damaged: object) -> None:
    with pytest.raises(ValueError):
        Choice.from_ranges(damaged)


@given(POINTS, ANY_SIZE, ANY_SIZE)
def test_a_larger_bucket_never_costs_less(points: list[tuple[int, float]], one: int, other: int) -> None:
    cost = Cost.fit(points)
    assert cost.at(min(one, other)) <= cost.at(max(one, other)) * (1 + 1e-12)


@given(POINTS)
def test_a_fit_never_says_more_than_was_measured(points: list[tuple[int, float]]) -> None:
    cost = Cost.fit(points)
    for size, seconds in points:
        assert cost.at(size) <= seconds * (1 + 1e-12)
    assert cost.slope > 0 or len({s for _, s in cost.points}) == 1


@given(MEASUREMENTS)
def test_measurements_go_through_json_unchanged(measured: list[Measurement]) -> None:
    assert measurements_from_json(json.loads(json.dumps(measurements_to_json(measured)))) == measured


@pytest.mark.parametrize("damaged", [[], None, [{"algorithm": "flat"}], [3], "text"])
def test_other_json_is_refused(damaged: object) -> None:
    with pytest.raises(ValueError, match="no measurements"):
        measurements_from_json(damaged)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        Measurement(algorithm="flat", wire="fp32", num_bytes=4, seconds=seconds)


def test_straight_lines_are_found_again() -> None:
    points = [(m.num_bytes, m.seconds) for m in straight("flat", latency_s=1e-3, per_byte_s=2e-9)]
    cost = Cost.fit(points)
    assert cost.latency_s == pytest.approx(1e-3)
    assert cost.slope == pytest.approx(2e-9)
    assert cost.at(1 << 26) == pytest.approx(1e-3 + (1 << 26) * 2e-9)


def test_quick_starters_are_chosen_below_the_crossover_and_fast_senders_above() -> None:
    measured = straight("flat", latency_s=1e-4, per_byte_s=4e-9)
    measured += straight("ring", latency_s=5e-4, per_byte_s=2e-9)
    choice = Choice.of_measurements(measured)
    assert choice.choose(190_000) == Candidate("flat", "fp32")
    assert choice.choose(210_000) == Candidate("ring", "fp32")
    assert choice.ranges[1].begin == pytest.approx(200_000, rel=1e-3)
    assert choice.describe() == "flat up to 200 KB, then ring"


def test_one_slow_trial_of_a_small_size_does_not_decide_over_larger_ones() -> None:
    cost = Cost.fit([(1 << 12, 0.5), (1 << 15, 1e-3), (1 << 18, 2e-3)])
    assert cost.at(1 << 12) == 1e-3


def test_what_was_left_behind_is_not_chosen_for_sizes_it_was_not_measured_at() -> None:
    measured = straight("ring", latency_s=5e-4, per_byte_s=2e-9)
    measured += straight("flat", latency_s=1e-4, per_byte_s=1e-12)[:2]
    choice = Choice.of_measurements(measured)
    assert choice.choose(1 << 15) == Candidate("flat", "fp32")
    assert choice.choose((1 << 15) + 1) == Candidate("ring", "fp32")
    assert [r.begin for r in choice.ranges] == [0, (1 << 15) + 1]


def test_a_wire_that_rounds_must_save_something() -> None:
    exact = straight("flat", latency_s=1e-4, per_byte_s=4e-9)
    for factor, expected in ((0.99, "fp32"), (0.6, "fp16")):
        rounded = straight("ring", latency_s=1e-4, per_byte_s=4e-9 * factor, wire="fp16")
        choice = Choice.of_measurements([*rounded, *exact])
        assert choice.fastest_wire([1 << 22] * 3) == expected
        assert {c.wire for c in choice.for_wire("fp16").candidates} == {"fp16"}


def test_a_wire_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UsageError):
        Choice.of_measurements(straight("flat", latency_s=1e-4, per_byte_s=4e-9)).for_wire("bf16")


def test_one_candidate_for_all_sizes_is_the_best_for_the_buckets_together() -> None:
    measured = straight("flat", latency_s=1e-4, per_byte_s=4e-9)
    measured += straight("ring", latency_s=5e-4, per_byte_s=2e-9)
    choice = Choice.of_measurements(measured)
    assert choice.for_all_sizes([1000, 1000, 100_000]).choose(1 << 26) == Candidate("flat", "fp32")
    assert choice.for_all_sizes([1000, 1000, 10_000_000]).choose(4) == Candidate("ring", "fp32")


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7), st.integers(1, 1 << 34))
def test_buckets_are_efficient_or_as_large_as_several_of_them_allow(
    latency_s: float, per_byte_s: float, gradient_bytes: int
) -> None:
    choice = Choice.of_measurements(straight("flat", latency_s=latency_s, per_byte_s=per_byte_s))
    size = choice.bucket_bytes(gradient_bytes=gradient_bytes)
    rates = [n / (latency_s + n * per_byte_s) for n in (size, 1 << 25)]
    assert rates[0] >= 8 / 9 * rates[1] * (1 - 1e-6) or size >= gradient_bytes / LEAST_BUCKETS
    assert size == SMALLEST_BUCKET_BYTES or size <= gradient_bytes / LEAST_BUCKETS + 1


def test_faster_links_ask_for_larger_buckets() -> None:
    sizes = [
        Choice.of_measurements(straight("flat", latency_s=1e-3, per_byte_s=per_byte_s)).bucket_bytes(
            gradient_bytes=1 << 30
        )
        for per_byte_s in (1e-8, 1e-9)
    ]
    assert sizes == [1 << 20, 1 << 23]
