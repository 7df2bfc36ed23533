"""Exports: read by Extra-P, ReFrame and JUBE themselves where they are installed, and by their formats' rules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.bench.scaling.sweep import PlannedRun
from hpctrain.bench.step.plan import StepCell
from hpctrain.cli.bench.group import bench_app
from hpctrain.errors import UsageError
from tests.unit.bench.sweeps import document_of, settings, written
from tests.unit.bench.test_scaling import RECIPE, amdahl


def export(*words: str | Path) -> str:
    done = CliRunner().invoke(bench_app, ["export", *map(str, words)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "my recipe.toml"
    path.write_text(RECIPE)
    return path


def test_extrap_lines_have_every_repeat_of_every_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "scaling.json", document_of(settings((1, 2, 4, 8, 16)), amdahl))
    lines = [json.loads(line) for line in export("extrap", path).splitlines()]
    assert {line["params"]["p"] for line in lines} == {1, 2, 4, 8, 16}
    assert {line["metric"] for line in lines} == {"time"}
    by_key = {(line["params"]["p"], line["callpath"]): line["value"] for line in lines}
    parts = ("step->input", "step->compute", "step->exposed_sync", "step->checkpoint")
    assert {callpath for _, callpath in by_key} == {"step", *parts}
    assert all(len(values) == 5 for values in by_key.values())
    for step, compute, run in zip(by_key[4, "step"], by_key[4, "step->compute"], range(5), strict=True):
        assert step == pytest.approx(
            64 / amdahl(PlannedRun(round=run, place=0, cell=StepCell(num_ranks=4, global_batch=64)))
        )
        assert compute == pytest.approx(0.6 * step)
    # Without CliRunner: with click 8.0 it mixes standard error into standard output.
    bench_app(["export", "extrap", str(path)], standalone_mode=False)
    assert capsys.readouterr().err == ""
    few = written(tmp_path / "few.json", document_of(settings((1, 2)), amdahl))
    bench_app(["export", "extrap", str(few)], standalone_mode=False)
    assert "asks for at least 5 numbers of ranks; there are 2" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("extrap") is None, reason="no extrap here")
def test_extrap_models_the_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "scaling.json", document_of(settings((1, 2, 4, 8, 16)), amdahl))
    out = tmp_path / "scaling.jsonl"
    export("extrap", path, "-o", out)
    words = ["extrap", "--json", str(out), "--print", "all", "--disable-progress"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert "Callpath: step->compute" in done.stdout
    assert done.stdout.count("Model:") >= 5


def test_the_reframe_check_is_python_and_has_the_sweep(recipe_path: Path, tmp_path: Path) -> None:
    text = export(
        "reframe",
        recipe_path,
        "--ranks",
        "2,4",
        "--weak",
        "--set",
        "reduction.wire=fp16",
        "--ranks-per-node",
        "2",
    )
    compile(text, "check.py", "exec")
    assert "num_ranks = parameter([2, 4])" in text
    assert repr(str(recipe_path)) in text
    assert "'--weak', '--set', 'reduction.wire=fp16'" in text
    assert "ranks_per_node = variable(int, type(None), value=2)" in text


def test_the_jube_file_is_xml_and_quotes_paths(recipe_path: Path) -> None:
    text = export("jube", recipe_path, "--ranks", "1,2", "--set", 'run.name="a&b"')
    root = ET.fromstring(text)
    parameters = {one.attrib["name"]: one.text or "" for one in root.iter("parameter")}
    assert parameters["ranks"] == "1,2"
    assert f"'{recipe_path}'" in parameters["measure"]
    assert """--set 'run.name="a&b"'""" in parameters["measure"]
    assert "--ranks-per-node" not in parameters["measure"]


def test_exports_that_cannot_work_are_refused(recipe_path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot share"):
        export("jube", recipe_path, "--ranks", "128")
    odd = tmp_path / "a$b.toml"
    odd.write_text(RECIPE)
    with pytest.raises(UsageError, match=r"JUBE replaces \$"):
        export("jube", odd)
    with pytest.raises(UsageError, match="cannot be written"):
        export("reframe", recipe_path, "-o", tmp_path / "none" / "check.py")
