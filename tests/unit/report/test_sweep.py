"""The report of a scaling sweep: its conclusions, with intervals, and a sweep whose runs were not kept."""

from __future__ import annotations

from pathlib import Path

from hpctrain.bench import ScalingDocument
from hpctrain.report import make_report, write_html
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
