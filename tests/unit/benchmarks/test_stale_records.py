"""The record of stale reads in the suite async."""

from __future__ import annotations

import pytest

from benchmarks.asynchronous.stale_steps import at_most
from benchmarks.asynchronous.suite import stale_record


def cell(seconds: float) -> list[dict[str, float]]:
    return [{"seconds": seconds + change, "largest": 2.0, "share": 0.1} for change in (0.3, 0.0, -0.2)]


def test_what_is_won_back_is_a_share_of_what_the_slow_rank_costs() -> None:
    seconds = {
        "synchronous": 1.0, "synchronous, one rank slow": 1.1, "stale": 1.0, "stale, one rank slow": 1.02,
    }  # fmt: skip
    cells = {name: cell(value) for name, value in seconds.items()}
    record = stale_record({"cells": cells, "ranks": 8, "staleness": 3, "num_steps": 70, "step_s": 1.0})
    assert record.value == pytest.approx(0.8)
    assert "1.000 s a step without and 1.100 s with the slow rank, 1.020 s" in record.what


def test_the_more_ranks_there_are_the_more_can_be_won_back() -> None:
    assert at_most(2) == pytest.approx(0.524, abs=1e-3)
    assert at_most(8) == pytest.approx(0.885, abs=1e-3)
