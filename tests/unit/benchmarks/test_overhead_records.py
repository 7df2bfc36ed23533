"""What is computed from the steps that were measured, and the page of it."""

from __future__ import annotations

import pytest

from benchmarks.overhead.suite import added, judging_records, per_step_s, step_records, tables

BASE_S = 1e-3
# Rounds differ by more than the parts cost.
DRIFT = [0.0, 40e-6, 15e-6, 80e-6, 5e-6, 60e-6, 30e-6]


def blocks(more_s: float) -> list[list[float]]:
    """A block of three steps each round; one of them has a hiccup."""
    return [[BASE_S + drift + more_s, BASE_S + drift + more_s, BASE_S + 5e-3] for drift in DRIFT]


def found(*, guards_s: float) -> dict[str, object]:
    costs = {"none": 0.0, "stop": 20e-6, "stragglers": 5e-6, "guards": guards_s, "all": 25e-6 + guards_s}
    return {
        "steps": {
            kind: {"step": blocks(cost), "wall": [[2e-6 + cost] * 3], "cpu": [[1e-6 + cost] * 3]}
            for kind, cost in costs.items()
        },
        "windows": {"stragglers": [1e-3, 3e-3], "guards": [1e-3]},
    }


def test_what_is_added_does_not_depend_on_how_fast_a_round_was() -> None:
    difference = added(blocks(20e-6), blocks(0.0))
    assert difference.median_s == pytest.approx(20e-6)
    assert difference.low_s == pytest.approx(20e-6)
    noisy = added([[BASE_S + 1e-5 * n] for n in range(9)], [[BASE_S]] * 9)
    assert noisy.median_s == pytest.approx(4e-5)
    assert noisy.low_s < noisy.median_s < noisy.high_s


def test_what_comes_every_ten_seconds_is_borne_by_200_steps() -> None:
    windows = {"stragglers": [1e-3, 3e-3], "guards": [1e-3]}
    assert per_step_s(windows, "stop") == 0.0
    assert per_step_s(windows, "stragglers") == pytest.approx(10e-6)
    assert per_step_s(windows, "all") == pytest.approx(15e-6)


def test_the_records_are_shares_of_a_step_and_fail_over_half_a_percent() -> None:
    records = {record.id: record for record in step_records(found(guards_s=60e-6))}
    assert [record.id for record in records.values()] == [f"overhead.{n}{k}" for n in "12" for k in "abcd"]
    assert records["overhead.1a"].value == pytest.approx(100 * 20e-6 / 0.05)
    assert records["overhead.1d"].value == pytest.approx(100 * (85e-6 + 15e-6) / 0.05)
    assert records["overhead.2c"].value == pytest.approx(100 * (60e-6 + 5e-6) / 0.05)
    assert all(record.holds for record in records.values())
    dear = {record.id: record for record in step_records(found(guards_s=300e-6))}
    assert [name for name, record in dear.items() if not record.holds] == [
        "overhead.1c", "overhead.1d", "overhead.2c", "overhead.2d",
    ]  # fmt: skip


def test_judging_counts_once_in_ten_seconds() -> None:
    (record,) = judging_records({"10000": [0.04, 0.06]})
    assert (record.id, record.value) == ("overhead.3.10000", pytest.approx(0.5))


def test_the_tables_have_each_part() -> None:
    made = tables({"records": [record.as_json() for record in step_records(found(guards_s=60e-6))]})
    assert "| the guards | 60.0 | 60.0 to 60.0 | 60.0 | 60.0 | 5.0 |" in made["added"]
    assert "| all three | 85.0 |" in made["added"]
    assert "| 2.000 | 1.000 | 3.000 |" in made["windows"]
    assert tables({"records": []}) == {}
