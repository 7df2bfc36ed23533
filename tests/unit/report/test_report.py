"""Reports of real runs: conclusions, tables, and the files that are written."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from hpctrain.errors import UsageError
from hpctrain.report import (
    Prices,
    Report,
    Table,
    conclude,
    make_report,
    read_prices,
    read_run,
    write_csv,
    write_html,
    write_markdown,
    write_png,
)
from hpctrain.report.conclusions import factors_of_loss
from hpctrain.scaling import Efficiency, against
from hpctrain.telemetry import PART_NAMES
from tests.unit.report.conftest import STEP_S, STEPS


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Report:
    return make_report(runs, prices=Prices(per_node_hour=3600, currency="EUR"))


def table_of(report: Report, name: str) -> Table:
    return next(table for table in report.tables if table.name == name)


def row_of(report: Report, table: str, name: str) -> list[object]:
    return list(next(row for row in table_of(report, table).rows if row.name == name).values)


def test_the_run_with_the_fewest_ranks_comes_first_and_is_the_reference(report: Report) -> None:
    assert list(table_of(report, "what-ran").columns) == ["run-1", "run-2"]
    assert row_of(report, "what-ran", "ranks") == [1, 2]
    assert row_of(report, "what-ran", "steps") == [STEPS, STEPS]
    assert row_of(report, "quality", "accuracy") == [0.5, 0.5]
    assert row_of(report, "pop", "samples/s per rank")[0] == 1.0


def test_the_parts_of_a_step_add_up_to_it(report: Report) -> None:
    rows = {row.name: row.values for row in table_of(report, "parts").rows}
    for column in range(2):
        total = sum(rows[name.replace("_", " ")][column] for name in PART_NAMES)  # type: ignore[misc]
        assert total == pytest.approx(rows["step"][column], rel=1e-9)


def test_a_slow_rank_is_named_as_what_the_others_wait_for(runs: list[Path]) -> None:
    texts = [each.text for each in conclude(read_run(runs[0]), reference=read_run(runs[1]))]
    (waiting,) = [text for text in texts if "waiting for slower ranks" in text]
    share = float(re.match(r"(\d+)% of the step", waiting)[1]) / 100  # type: ignore[index]
    # The mean over two ranks of what one waits, of a step as long as the slow one's.
    assert 0.03 < share < 0.45, waiting
    assert "mostly for the same ranks" in waiting
    assert waiting.endswith("rank 1 on n1 needs the longest.")


def carried(run: Efficiency) -> float:
    """Returns what the work that the first step carries over from one that is left out changes in the factors."""
    own, waited = run.own_s["mean"], run.step_s - rest_of(run)
    return own / (own + waited) * run.step_s / rest_of(run)


def rest_of(run: Efficiency) -> float:
    """Returns the seconds per step that are neither a reduction nor waiting for one."""
    return run.computed_s / run.factors.computing


def test_the_causes_multiply_to_the_speed_of_a_rank(runs: list[Path]) -> None:
    run, reference = (read_run(directory).efficiency for directory in runs)
    assert run is not None
    assert reference is not None
    factors = factors_of_loss(run, reference=reference)
    speed = against(run, reference=reference).relative_speed
    assert math.prod(factors.values()) == pytest.approx(speed * carried(run) / carried(reference), rel=1e-6)
    assert factors["load balance"] < 0.97


def test_cost_follows_from_the_price_and_the_hours(report: Report, runs: list[Path]) -> None:
    hours = row_of(report, "resources", "node-hours")
    assert row_of(report, "resources", "cost") == pytest.approx([3600 * each for each in hours])  # type: ignore[operator]
    # At least the sleeps, in which two nodes take part.
    assert hours[1] > 2 * 3 * STEP_S * STEPS / 3600  # type: ignore[operator]


def test_a_page_is_whole_small_and_loads_nothing(report: Report, tmp_path: Path) -> None:
    write_html(report, tmp_path / "made" / "report.html")
    text = (tmp_path / "made" / "report.html").read_text()
    assert len(text) < 2_000_000
    assert "<script" not in text
    assert not re.search(r"(src|href)=\"(?!#)", text)
    assert "url(http" not in text
    assert text.count("<svg") == len(report.plots) >= 4
    assert text.count('role="img"') == len(report.plots)
    assert not re.search(r"#0072b2|#d55e00", re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL))
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["report.html"]


def test_tables_are_written_in_full_and_figures_as_files(report: Report, tmp_path: Path) -> None:
    write_csv(report, tmp_path)
    with (tmp_path / "parts.csv").open() as file:
        head, *lines = csv.reader(file)
    assert head == ["", "unit", "run-1", "run-2"]
    written = {line[0]: [float(value) for value in line[2:]] for line in lines}
    assert written["compute"] == row_of(report, "parts", "compute")
    write_png(report, tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(plot.name for plot in report.plots)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    write_markdown(report, tmp_path / "report.md")
    markdown = (tmp_path / "report.md").read_text()
    first = next(line for line in markdown.splitlines() if line.startswith("| ranks"))
    assert first == "| ranks | 1 | 2 |"
    assert "## POP efficiencies" in markdown


def test_a_run_that_was_killed_is_reported_as_far_as_it_came(runs: list[Path], tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(runs[0], killed)
    (killed / "summary.json").unlink()
    path = killed / "metrics" / "rank-00000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines if line.get("step", 0) <= 10) + '{"kind": "st'
    )
    (killed / "metrics" / "rank-00001.jsonl").unlink()
    report = make_report([killed], with_plots=False)
    assert row_of(report, "what-ran", "status") == ["runs, or was killed"]
    assert row_of(report, "what-ran", "steps") == [10]
    assert "rank 1 of 2" in report.notes[0]


def test_what_is_no_run_is_refused_in_words(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not the directory of a run: it has no environment.json"):
        make_report([tmp_path])
    with pytest.raises(UsageError, match="given twice"):
        make_report([runs[0], runs[0] / ".." / runs[0].name])
    (tmp_path / "prices.toml").write_text("per_node_hour = -1\ncurrency = 'EUR'\n")
    with pytest.raises(UsageError, match="per_node_hour: Input should be greater than or equal to 0"):
        read_prices(tmp_path / "prices.toml")
