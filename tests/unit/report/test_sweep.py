"""The report of a scaling sweep: its conclusions, with intervals, and a sweep whose runs were not kept."""

from __future__ import annotations

from pathlib import Path

from hpctrain.bench import ScalingDocument
from hpctrain.bench.scaling.sweep import FailedSplit
from hpctrain.report import make_report, write_html, write_markdown
from tests.unit.bench.sweeps import document_of, settings


def slowing(num_ranks: int) -> float:
    """Returns a rate that follows Amdahl's law with a serial share of a tenth."""
    return 1000 / (0.1 + 0.9 / num_ranks)


def a_sweep(*, num_runs: int | None = None) -> ScalingDocument:
    return document_of(
        settings((1, 2, 4, 8)),
        lambda run: slowing(run.cell.num_ranks) * (1 + 0.001 * (run.round % 3)),
        num_runs=num_runs,
    )


def test_the_largest_size_is_judged_with_its_interval(tmp_path: Path) -> None:
    report = make_report([], sweep=a_sweep())
    assert report.title == "mine: strong scaling on 1, 2, 4, 8 ranks"
    ((label, conclusions),) = report.conclusions
    assert label == "the sweep"
    first, law = (each.text for each in conclusions)
    assert first == (
        "8 ranks reach 59% (95% interval 59% to 59%) of the samples/s per rank on 1 rank, a speedup of 4.71."
    )
    assert law == "Of the scaling laws, Amdahl describes the rates."
    assert conclusions[0].kind == "problem"
    assert [plot.name for plot in report.plots] == ["efficiency"]
    assert [table.name for table in report.tables] == ["scaling"]
    write_html(report, tmp_path / "report.html")
    assert "strong scaling on 1, 2, 4, 8 ranks" in (tmp_path / "report.html").read_text()


def test_an_unfinished_sweep_says_so_first(runs: list[Path]) -> None:
    report = make_report(runs, sweep=a_sweep(num_runs=7))
    (_, conclusions), *of_runs = report.conclusions
    assert conclusions[0].text == "The sweep is not complete."
    assert [label for label, _ in of_runs] == ["run-1", "run-2"]


def test_splits_of_a_node_are_a_verdict_and_a_row_each(tmp_path: Path) -> None:
    rates = {1: 800.0, 2: 1000.0, 4: 900.0}
    sweep = document_of(
        settings((1, 2, 4), cores=4),
        lambda run: rates[run.cell.num_ranks],
        failed=FailedSplit(ranks=4, exit_code=8),
    )
    report = make_report([], sweep=sweep)
    assert report.title == "mine: ranks or threads on 4 cores"
    assert report.plots == []
    ((_, conclusions),) = report.conclusions
    unfinished, verdict, start = conclusions
    assert unfinished.text == "The sweep is not complete."
    assert verdict.text.startswith("On this node, 2 ranks x 2 threads train this model fastest: 1.25 times")
    assert verdict.kind == "problem"
    assert "--ntasks-per-node=2 --cpus-per-task=2" in start.text
    (table,) = report.tables
    assert table.title == "Splits of 4 cores"
    assert [(row.name, *row.shown()[:4]) for row in table.rows] == [
        ("1", "4", "800", "80.00", "1.00"), ("2", "2", "1,000", "64.00", "1.25"), ("4", "1", "failed", "–", "–"),
    ]  # fmt: skip
    write_html(report, tmp_path / "report.html")
    write_markdown(report, tmp_path / "report.md")
    assert "train this model fastest" in (tmp_path / "report.html").read_text()
    assert "| 2 | 2 | 1,000 |" in (tmp_path / "report.md").read_text()
