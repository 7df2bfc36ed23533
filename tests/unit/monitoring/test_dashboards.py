"""The dashboards: their layout, that their expressions ask for metrics that runs expose, and the committed copies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import UsageError
from hpctrain.monitoring import Dashboard, Query, monitoring_files, read_dashboards, write_monitoring
from hpctrain.telemetry import METRICS, MetricType
from tests.ranks_launcher import REPOSITORY

DEPLOYED = REPOSITORY / "deploy" / "monitoring"
# What Prometheus adds to every series of a run.
TARGET_LABELS = {"run", "run_id", "job", "instance"}

dashboards = pytest.mark.parametrize("dashboard", read_dashboards(), ids=lambda dashboard: dashboard.name)


def written(dashboard: Dashboard) -> Any:
    """The file of a dashboard, read again."""
    return json.loads(monitoring_files()[f"dashboards/{dashboard.name}.json"])


def queries() -> Iterator[tuple[str, Query]]:
    for dashboard in read_dashboards():
        for panel in dashboard.panels:
            for query in panel.queries:
                yield f"{dashboard.name}, {panel.title}", query


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yields each metric of ours that an expression asks for, and the labels by which it is selected."""
    for name, chosen in re.findall(r"\b(hpctrain_\w+)(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)[=!]", chosen))


def unknown(expression: str) -> list[str]:
    """What an expression asks for and no run exposes."""
    found = []
    for name, labels in selectors(expression):
        histogram = METRICS.get(re.sub("_(bucket|sum|count)$", "", name))
        if histogram is not None and histogram.type is MetricType.HISTOGRAM:
            metric = histogram if name != histogram.name else None
        else:
            metric = METRICS.get(name)
        if metric is None:
            found.append(name)
        else:
            found += [f"{name}{{{label}}}" for label in labels - TARGET_LABELS - set(metric.all_labels)]
    return found


def test_the_check_of_names_finds_what_no_run_exposes() -> None:
    assert unknown('rate(hpctrain_samples_total{run=~"$run"}[5m])') == []
    assert unknown('hpctrain_sample_total / hpctrain_loss{rank="0"}') == [
        "hpctrain_sample_total",
        "hpctrain_loss{rank}",
    ]
    assert unknown("hpctrain_step_seconds") == [
        "hpctrain_step_seconds"
    ]  # a histogram has no series of its own name


def test_panels_ask_only_for_metrics_and_labels_of_the_catalogue() -> None:
    asked = [(where, unknown(query.expr)) for where, query in queries()]
    assert len(asked) > 50
    assert [(where, names) for where, names in asked if names] == []


def test_alerts_ask_only_for_metrics_and_labels_of_the_catalogue() -> None:
    assert (
        unknown(re.sub(r"^ *(#|summary:).*", "", monitoring_files()["alerts.yml"], flags=re.MULTILINE)) == []
    )


def test_every_expression_is_limited_to_the_chosen_runs() -> None:
    for where, query in queries():
        assert all("run" in labels for _, labels in selectors(query.expr)), where


@dashboards
def test_panels_stand_side_by_side_without_overlap(dashboard: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in written(dashboard)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@dashboards
def test_each_panel_takes_its_data_from_the_chosen_source(dashboard: Dashboard) -> None:
    document = written(dashboard)
    datasource, run = document["templating"]["list"]
    assert (datasource["name"], datasource["type"], datasource["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert (run["name"], run["definition"]) == ("run", "label_values(hpctrain_run_info, run)")
    assert "__inputs" not in document
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert run["datasource"] == source
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert len(panels) == len(dashboard.panels)
    for panel in panels:
        assert panel["description"]
        assert panel["datasource"] == source
        assert [target["datasource"] for target in panel["targets"]] == [source] * len(panel["targets"])
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_the_dashboards_have_different_addresses() -> None:
    addresses = {written(dashboard)["uid"] for dashboard in read_dashboards()}
    assert addresses == {"hpctrain-executive", "hpctrain-on-call", "hpctrain-debug"}


@pytest.mark.parametrize("name", sorted(monitoring_files()))
def test_the_committed_copy_is_what_is_written(name: str) -> None:
    assert (DEPLOYED / name).read_text() == monitoring_files()[name], "run `make docs`"


def test_nothing_else_is_committed_there() -> None:
    found = {str(path.relative_to(DEPLOYED)) for path in DEPLOYED.rglob("*") if path.is_file()}
    assert found == set(monitoring_files())


def test_the_command_writes_the_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.cli.main", "export", "monitoring", str(tmp_path / "new")],
        capture_output=True, text=True, timeout=300, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, text in monitoring_files().items():
        assert (tmp_path / "new" / name).read_text() == text
        assert str(tmp_path / "new" / name) in done.stdout


def test_a_folder_that_cannot_be_made_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"file/dashboards/executive\.json cannot be written \(Not a directory\)"
    ):
        write_monitoring(tmp_path / "file")
