"""The catalogue follows Prometheus' rules for names, and the guide shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.telemetry import CATALOGUE, METRICS, Metric, MetricType

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "metrics-out.md"
# What no label may be: its values would grow with the length or the size of a run.
UNBOUNDED = {"step", "epoch", "node", "host", "checkpoint", "path", "pid"}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_names_units_and_labels_follow_the_rules(metric: Metric) -> None:
    assert re.fullmatch(r"hpctrain_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    if metric.unit:
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    else:
        assert not re.search(r"_(seconds|bytes|ratio|joules|ms|mb|percent)(_|$)", metric.name)
    assert metric.unit in ("", "seconds", "bytes", "joules", "ratio")
    assert metric.help.endswith(".")
    assert set(metric.all_labels).isdisjoint(UNBOUNDED)
    assert "job_id" not in metric.all_labels or metric.name == "hpctrain_run_info"
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.buckets) == (metric.type is MetricType.HISTOGRAM)


def test_every_question_is_served_and_no_name_is_twice() -> None:
    assert {question for metric in CATALOGUE for question in metric.serves} == {f"M{n}" for n in range(1, 16)}
    assert len(METRICS) == len(CATALOGUE)


def test_the_guide_has_the_table() -> None:
    rows = [
        f"| `{metric.name}` | {metric.type.value} | {', '.join(metric.all_labels)} | {', '.join(metric.serves)} | "
        f"{metric.help} |"
        for metric in CATALOGUE
    ]
    found = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `hpctrain_")]
    assert found == rows
