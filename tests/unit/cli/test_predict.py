"""`hpctrain bench failures` and `hpctrain bench predict`: output, documents, and what they refuse."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from hpctrain.errors import UsageError

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from hpctrain.cli.bench.group import bench_app

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer"
)


def test_failures_prints_each_interval_and_number_of_spares(tmp_path: Path) -> None:
    pytest.importorskip("simpy")
    path = tmp_path / "failures.json"
    options = [
        "--nodes",
        "100",
        "--node-hours",
        "2000",
        "--intervals",
        "10,60",
        "--spares",
        "0,2",
        "--hours",
        "2000",
    ]
    result = CliRunner().invoke(
        bench_app, ["failures", *options, "--json", str(path)], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "best:" in result.output
    outcomes = json.loads(path.read_text())["outcomes"]
    assert {(o["interval_s"], o["spares"]) for o in outcomes} == {(600, 0), (600, 2), (3600, 0), (3600, 2)}
    assert all(0 < o["trained"] < 1 for o in outcomes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["failures", "--nodes", "4", "--intervals", "0"], "--intervals"),
        (["predict", "--calibration", "nowhere"], "does not exist"),
        (["predict", "--calibration", ".", "--nodes", "8..2"], "--nodes"),
        (["predict", "--calibration", ".", "--link", "fast"], "not a link rate"),
        (["predict", "--calibration", "."], "needs a document|is not the directory of a run"),
    ],
)
def test_wrong_options_are_said(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(bench_app, options, catch_exceptions=False)
