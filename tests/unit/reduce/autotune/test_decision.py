"""What is chosen from measurements: pure, over measurements of any kind."""

from __future__ import annotations

import json
from dataclasses import replace

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
from hpctrain.reduce.autotune.link_speed import Candidate, Measurement, TimeBySize
from hpctrain.reduce.autotune.tune import TrialResults, bucket_sizes

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


@given(MEASUREMENTS, st.lists(ANY_SIZE, min_size=1, max_size=4))
def test_the_choice_is_the_candidate_that_costs_least(measured: list[Measurement], sizes: list[int]) -> None:
    choice = Choice.of_measurements(measured)
    least = min(sum(choice.costs[c].at(size) for size in sizes) for c in eligible(choice.costs, max(sizes)))
    assert choice.seconds(sizes) == pytest.approx(least, rel=1e-6)
    assert choice.fastest(sizes) in choice.candidates


@given(POINTS, ANY_SIZE, ANY_SIZE)
def test_a_larger_bucket_never_costs_less(points: list[tuple[int, float]], one: int, other: int) -> None:
    cost = TimeBySize.fit(points)
    assert cost.at(min(one, other)) <= cost.at(max(one, other)) * (1 + 1e-12)


@given(POINTS)
def test_a_fit_never_says_more_than_was_measured(points: list[tuple[int, float]]) -> None:
    cost = TimeBySize.fit(points)
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
    cost = TimeBySize.fit(points)
    assert cost.latency_s == pytest.approx(1e-3)
    assert cost.slope == pytest.approx(2e-9)
    assert cost.at(1 << 26) == pytest.approx(1e-3 + (1 << 26) * 2e-9)


def test_quick_starters_are_chosen_for_small_buckets_and_fast_senders_for_large_ones() -> None:
    measured = straight("flat", latency_s=1e-4, per_byte_s=4e-9)
    measured += straight("ring", latency_s=5e-4, per_byte_s=2e-9)
    choice = Choice.of_measurements(measured)
    flat, ring = Candidate("flat", "fp32"), Candidate("ring", "fp32")
    assert choice.fastest([190_000]) == choice.fastest([1000, 1000, 100_000]) == flat
    assert choice.fastest([210_000]) == choice.fastest([1000, 1000, 10_000_000]) == ring


def test_one_slow_trial_of_a_small_size_does_not_decide_over_larger_ones() -> None:
    cost = TimeBySize.fit([(1 << 12, 0.5), (1 << 15, 1e-3), (1 << 18, 2e-3)])
    assert cost.at(1 << 12) == 1e-3


def test_what_was_left_behind_is_not_chosen_for_sizes_it_was_not_measured_at() -> None:
    measured = straight("ring", latency_s=5e-4, per_byte_s=2e-9)
    measured += straight("flat", latency_s=1e-4, per_byte_s=1e-12)[:2]
    choice = Choice.of_measurements(measured)
    assert choice.fastest([1 << 15]) == Candidate("flat", "fp32")
    assert choice.fastest([4, (1 << 15) + 1]) == Candidate("ring", "fp32")


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


def test_the_faster_wire_and_its_fastest_algorithm_are_settled_for_the_models_buckets() -> None:
    measured = straight("flat", latency_s=1e-5, per_byte_s=2e-9)
    measured += straight("direct", latency_s=2e-5, per_byte_s=1e-9)
    exact = TrialResults(choice=Choice.of_measurements(measured), source="told")
    measured += [replace(m, wire="fp16", seconds=0.6 * m.seconds) for m in measured]
    both = TrialResults(choice=Choice.of_measurements(measured), source="told")
    assert exact.choose(gradient_bytes=1000).candidate == Candidate("flat", "fp32")
    assert exact.choose(gradient_bytes=10**6).candidate == Candidate("direct", "fp32")
    assert both.choose(gradient_bytes=10**6).candidate == Candidate("direct", "fp16")
    asked = both.choose(gradient_bytes=10**6, bucket_bytes=777)
    assert (asked.candidate, asked.bucket_bytes) == (Candidate("flat", "fp16"), 777)
    assert {entry["wire"] for entry in asked.record()["candidates"]} == {"fp16"}


def test_buckets_for_a_prediction_hold_all_gradients() -> None:
    assert bucket_sizes(10, bucket_bytes=4) == [4, 4, 2]
    assert bucket_sizes(8, bucket_bytes=4) == [4, 4]
    assert bucket_sizes(0, bucket_bytes=4) == [0]


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
