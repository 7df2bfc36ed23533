"""Runs exported to MLflow, read back with its own client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import UsageError
from hpctrain.report import export_to_mlflow
from hpctrain.telemetry import read_records
from tests.unit.report.conftest import STEPS
from tests.unit.run.tracking.collector import Collector

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store; MLflow needs seconds to make one."""
    folder = tmp_path_factory.mktemp("store")
    client_of(folder).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def fresh(runs: list[Path], tmp_path: Path) -> Path:
    """A copy of the run of two ranks."""
    return Path(shutil.copytree(runs[0], tmp_path / "run"))


@pytest.fixture
def directory(fresh: Path, store: Path) -> Path:
    """The same, which MLflow knows already."""
    shutil.copy(store, fresh)
    return fresh


def client_of(directory: Path) -> Any:
    return mlflow.MlflowClient(f"sqlite:///{directory}/mlflow.db")


def history(client: Any, run_id: str, name: str) -> dict[int, float]:
    points = client.get_metric_history(run_id, name)
    assert len({point.step for point in points}) == len(points), "a step is there twice"
    return {point.step: point.value for point in points}


def add_records(directory: Path, *, first: int, last: int, loss: float) -> None:
    """Appends steps as another start would record them."""
    path = directory / "metrics/rank-00000.jsonl"
    newest = [record for record in read_records(path) if record["kind"] == "step"][-1]
    with path.open("a") as file:
        for step in range(first, last + 1):
            at = newest["time"] + step
            file.write(json.dumps({**newest, "step": step, "loss": loss, "time": at}) + "\n")


def test_mlflow_has_the_recipe_the_numbers_by_step_and_the_summary(fresh: Path) -> None:
    directory = fresh
    found = export_to_mlflow(directory, experiment="trials")
    client = client_of(directory)
    run = client.get_run(found.run_id)
    assert client.get_experiment(run.info.experiment_id).name == found.experiment == "trials"
    assert (found.new, run.info.status, run.info.run_name) == (True, "FINISHED", "run")
    assert run.data.params["run.steps"] == str(STEPS)
    assert run.data.params["data.global_batch"] == "24"
    records = list(read_records(directory / "metrics/rank-00000.jsonl"))
    steps = {record["step"]: record for record in records if record["kind"] == "step"}
    for name, value in (
        ("loss", lambda record: record["loss"]),
        ("seconds/compute", lambda record: record["seconds"]["compute"]),
    ):
        assert history(client, found.run_id, name) == {step: value(steps[step]) for step in steps}
    checkpoints = [record["step"] for record in records if record["kind"] == "checkpoint"]
    assert sorted(history(client, found.run_id, "checkpoint/write_seconds")) == sorted(set(checkpoints))
    summary = json.loads((directory / "summary.json").read_text())
    assert run.data.metrics["summary/samples_per_s"] == summary["samples_per_s"]
    environment = json.loads((directory / "environment.json").read_text())
    assert run.data.tags["hpctrain.hosts"] == environment["ranks"][0]["host"]
    assert run.data.tags["hpctrain.status"] == "finished"
    assert run.data.tags["hpctrain.directory"] == str(directory)


def test_a_run_of_slurm_has_its_job_and_commit(directory: Path) -> None:
    starts = [json.loads(line) for line in (directory / "starts.jsonl").read_text().splitlines()]
    environment = json.loads((directory / "environment.json").read_text()) | {
        "commit": "0123456789ab+changes"
    }
    (directory / "environment.json").write_text(json.dumps(environment))
    lines = []
    for job in ("41", "42"):
        starts[0]["environment"]["variables"] = {"SLURM_JOB_ID": job}
        lines.append(json.dumps(starts[0]))
    (directory / "starts.jsonl").write_text("\n".join(lines) + "\n")
    tags = client_of(directory).get_run(export_to_mlflow(directory).run_id).data.tags
    assert tags["hpctrain.jobs"] == "41 42"
    assert tags["mlflow.source.git.commit"] == "0123456789ab+changes"


def test_exporting_again_adds_what_has_come_and_nothing_twice(directory: Path) -> None:
    first = export_to_mlflow(directory)
    again = export_to_mlflow(directory)
    assert (again.run_id, again.new) == (first.run_id, False)
    assert again.num_values < first.num_values / 10  # the summary's only
    client = client_of(directory)
    assert len(history(client, first.run_id, "loss")) == STEPS
    history(client, first.run_id, "summary/samples_per_s")

    # A start with another learning rate, whose directory was moved meanwhile.
    moved = directory.rename(directory.with_name("moved"))
    add_records(moved, first=STEPS + 1, last=STEPS + 5, loss=0.125)
    recipe = (moved / "recipe.toml").read_text()
    assert "\nlr = 0.001\n" in recipe
    (moved / "recipe.toml").write_text(recipe.replace("\nlr = 0.001\n", "\nlr = 0.05\n"))
    third = export_to_mlflow(moved, name="another name")
    client = client_of(moved)
    run = client.get_run(third.run_id)
    assert (third.run_id, run.info.run_name) == (first.run_id, "another name")
    losses = history(client, first.run_id, "loss")
    assert len(losses) == STEPS + 5
    assert losses[STEPS + 5] == 0.125
    assert (run.data.params["optimizer.lr"], run.data.tags["changed.optimizer.lr"]) == ("0.001", "0.05")
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_a_step_done_twice_counts_as_it_was_done_last(directory: Path) -> None:
    add_records(directory, first=STEPS - 1, last=STEPS, loss=0.5)
    client, found = client_of(directory), export_to_mlflow(directory)
    losses = history(client, found.run_id, "loss")
    assert (len(losses), losses[STEPS]) == (STEPS, 0.5)


def test_more_values_than_a_request_may_hold(directory: Path) -> None:
    add_records(directory, first=STEPS + 1, last=STEPS + 1200, loss=0.25)
    found = export_to_mlflow(directory)
    assert found.num_values > 1000 * len({"loss", "lr", "grad_norm"})
    assert len(history(client_of(directory), found.run_id, "loss")) == STEPS + 1200


def test_a_run_that_was_killed_is_running_there(directory: Path) -> None:
    (directory / "summary.json").unlink()
    found = export_to_mlflow(directory)
    assert client_of(directory).get_run(found.run_id).info.status == "RUNNING"


@pytest.mark.parametrize("fault", ["refuses", "down", "not a store"])
def test_a_store_that_refuses_is_an_error_with_exit_code_5(directory: Path, fault: str) -> None:
    if fault == "not a store" and mlflow.__version__.startswith("2."):
        pytest.skip("MLflow 2 tries for most of an hour to open a database")
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    collector = Collector(status=403)
    try:
        uri = {
            "refuses": collector.url.replace("//", "//me:secret@"),
            "down": "http://127.0.0.1:9",
            "not a store": f"sqlite:///{directory}/summary.json/a.db",
        }[fault]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain.cli.main", "export", "mlflow", str(directory), "--tracking-uri", uri],
            capture_output=True, text=True, env=environment, timeout=300, check=False,
        )  # fmt: skip
    finally:
        collector.close()
    assert done.returncode == 5, done.stderr
    assert f"MLflow at {uri.replace('me:secret@', '')} does not take the run" in done.stderr
    assert "secret" not in done.stderr
    assert "own records" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_what_is_no_run_is_refused(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(UsageError, match=r"no environment\.json"):
        export_to_mlflow(tmp_path)
    (directory / "starts.jsonl").unlink()
    with pytest.raises(UsageError, match="has not begun"):
        export_to_mlflow(directory)
