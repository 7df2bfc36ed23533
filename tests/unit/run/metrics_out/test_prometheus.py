"""Runs that tell their metrics to Prometheus, in this process: what they expose, and what may fail."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import RecipeError
from hpctrain.run.metrics_out import run_id
from hpctrain.run.recipe.sections import TelemetrySection
from hpctrain.telemetry import METRICS
from tests.run_files import records_of
from tests.states import wait_for
from tests.unit.run.training_cases import Task, run

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def parsed(text: str) -> Samples:
    """Name of the sample -> labels -> value. Raises ValueError for text that is not in Prometheus' format."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


class Looks(Task):
    """Calls `look` in the loss of a chosen step, on the rank whose task it is."""

    def __init__(self, look: Any, *, at_step: int) -> None:
        super().__init__()
        self.look, self.at_step, self.seen_there = look, at_step, None

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.steps + 1 == self.at_step:
            self.seen_there = self.look()
        return super().loss(model, fields)


def scrape(target: str) -> Samples:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=300) as answer:
        return parsed(answer.read().decode())


def targets_in(folder: Path) -> list[str]:
    (path,) = folder.iterdir()
    (entry,) = json.loads(path.read_text())
    return list(entry["targets"])


def test_an_endpoint_tells_what_the_records_hold_and_is_gone_at_the_end(where: Path) -> None:
    folder = where / "run" / "metrics" / "prometheus"
    task = Looks(lambda: scrape(targets_in(folder)[0]), at_step=9)
    run(
        where, task,
        telemetry={"prometheus": "endpoint", "metrics_every_steps": 3, "evaluate_every_steps": 4},
        checkpoint={"every_steps": 5},
    )  # fmt: skip
    assert task.seen_there is not None
    found: Samples = task.seen_there
    nothing: frozenset[tuple[str, str]] = frozenset()
    assert found["hpctrain_step"] == {nothing: 8.0}
    assert found["hpctrain_steps_total"] == {
        nothing: 8.0
    }  # each one counts, though every third is in the file
    assert found["hpctrain_samples_total"] == {nothing: 8 * 20.0}
    assert found["hpctrain_target_steps"] == {nothing: 10.0}
    assert found["hpctrain_step_seconds_count"] == {frozenset({("rank", "0")}): 8.0}
    (total,) = found["hpctrain_step_seconds_sum"].values()
    assert sum(found["hpctrain_step_part_seconds_total"].values()) == pytest.approx(total, rel=1e-6)
    assert found["hpctrain_checkpoints_committed_total"] == {nothing: 1.0}
    assert found["hpctrain_last_checkpoint_step"] == {nothing: 5.0}
    assert set(found["hpctrain_evaluation"]) == {frozenset({("metric", "accuracy")})}
    assert found["hpctrain_starts_total"] == {nothing: 1.0}
    ((info, one),) = found["hpctrain_run_info"].items()
    assert one == 1
    assert dict(info)["run_id"] == run_id(where / "run")
    assert dict(info)["directory"] == str(where / "run")
    cpu = found["hpctrain_cpu_seconds_total"][frozenset({("rank", "0")})]
    assert cpu > 0
    assert found["hpctrain_resident_memory_bytes"][frozenset({("rank", "0")})] > 1e7
    assert list(folder.iterdir()) == []
    assert [record["step"] for record in records_of(where / "run")] == [3, 6, 9, 10]
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def test_the_first_rank_of_each_node_has_an_endpoint(where: Path) -> None:
    folder = where / "run" / "metrics" / "prometheus"
    tasks = [Looks(lambda: {t: scrape(t) for t in targets_in(folder)}, at_step=5) for _ in range(3)]

    def case(world: World) -> None:
        run(
            where, tasks[world.rank], world=world, nodes=["a", "a", "b"], telemetry={"prometheus": "endpoint"}
        )

    run_threads(3, case, timeout_s=300)
    seen: Mapping[str, Samples] = tasks[0].seen_there  # type: ignore[assignment]
    first, second = seen.values()
    assert set(second) < set(first)
    assert set(second["hpctrain_step_seconds_count"]) == {frozenset({("rank", "2")})}
    assert "hpctrain_loss" not in second
    assert first["hpctrain_nodes"] == {frozenset(): 2.0}


def test_a_text_file_has_the_run_in_every_series_and_is_removed_at_the_end(where: Path) -> None:
    folder = where / "textfiles"
    folder.mkdir()
    path = folder / f"hpctrain-{run_id(where / 'run')}-rank-00000.prom"
    task = Looks(path.read_text, at_step=3)
    telemetry = {"prometheus": "textfile", "prometheus_directory": str(folder), "prometheus_every_s": 0.01}
    run(where, task, telemetry=telemetry)
    assert task.seen_there is not None
    for series in parsed(task.seen_there).values():
        for labels in series:
            assert {name: dict(labels)[name] for name in ("run", "run_id")} == {
                "run": "run",
                "run_id": run_id(where / "run"),
            }
    assert list(folder.iterdir()) == []


def whole(where: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Checks that the run finished with its records, and returns what it said on standard error."""
    assert [record["step"] for record in records_of(where / "run")] == list(range(1, 11))
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("hpctrain: ")]


def test_a_port_that_is_in_use_is_one_warning(where: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run(where, Task(), telemetry={"prometheus": "endpoint", "prometheus_port": port})
    assert whole(where, capfd) == [
        f"hpctrain: the Prometheus endpoint could not be opened: 127.0.0.1:{port}: Address already in use; "
        "training goes on without it"
    ]
    assert not (where / "run" / "metrics" / "prometheus").exists()


def test_targets_that_cannot_be_written_are_one_warning_and_the_endpoint_is_there(
    where: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (where / "taken").write_text("")
    telemetry = {"prometheus": "endpoint", "prometheus_targets": str(where / "taken")}
    run(where, Task(), telemetry=telemetry)
    (warning,) = whole(where, capfd)
    assert warning.startswith("hpctrain: the file with Prometheus' targets could not be opened: ")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_full_disk_is_one_warning(where: Path, capfd: pytest.CaptureFixture[str], at_once: bool) -> None:
    folder = where / "textfiles"
    folder.mkdir()
    path = folder / f"hpctrain-{run_id(where / 'run')}-rank-00000.prom"
    partial = folder / f".{path.name}.{os.getpid()}.partial"

    def fill_disk() -> None:
        """From now on nothing can be written where the file is prepared; returns when that was noticed."""
        while not partial.is_symlink():
            with contextlib.suppress(FileExistsError):  # it is being written just now
                partial.symlink_to("/dev/full")
        wait_for(lambda: all(thread.name != "hpctrain-text-file" for thread in threading.enumerate()))

    if at_once:
        partial.symlink_to("/dev/full")
    task = Task() if at_once else Looks(fill_disk, at_step=4)
    every_s = 1000.0 if at_once else 0.05
    telemetry = {"prometheus": "textfile", "prometheus_directory": str(folder), "prometheus_every_s": every_s}
    run(where, task, telemetry=telemetry)
    reason = f"{path}: No space left on device"
    assert whole(where, capfd) == [
        f"hpctrain: the Prometheus text file could not be opened: {reason}; training goes on without it"
        if at_once
        else f"hpctrain: the Prometheus text file failed and is off from now on: {reason}; training goes on"
    ]
    assert not path.exists()


def test_a_missing_package_is_an_error_before_training(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "prometheus_client", None
    )  # as Python marks a module that cannot be imported
    with pytest.raises(
        RecipeError, match=r"'endpoint' needs prometheus-client.*pip install 'hpctrain\[metrics\]'"
    ):
        run(where, Task(), telemetry={"prometheus": "endpoint"})
    assert not (where / "run").exists()


@pytest.mark.parametrize(
    "section", [{"prometheus": "textfile"}, {"prometheus": "endpoint", "prometheus_directory": "/tmp"}]
)
def test_a_text_file_and_its_directory_belong_together(section: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="belong together"):
        TelemetrySection.model_validate(section)


def test_all_that_a_run_exposes_is_in_the_catalogue(where: Path) -> None:
    folder = where / "run" / "metrics" / "prometheus"

    def names() -> dict[str, str]:
        with urllib.request.urlopen(f"http://{targets_in(folder)[0]}/metrics", timeout=300) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return {f.name + "_total" * (f.type == "counter"): f.type for f in families}

    task = Looks(names, at_step=2)
    run(where, task, telemetry={"prometheus": "endpoint"})
    assert task.seen_there is not None
    for name, kind in task.seen_there.items():
        assert METRICS[name].type.value == kind


@pytest.mark.parametrize("how", ["endpoint", "textfile"])
def test_nothing_is_left_of_a_run_that_fails(where: Path, how: str) -> None:
    folder = where / "files"
    folder.mkdir()
    key = "prometheus_targets" if how == "endpoint" else "prometheus_directory"
    task = Task(fail_in_metrics=True)
    with pytest.raises(KeyError, match="a bug in the metrics"):
        run(where, task, telemetry={"prometheus": how, key: str(folder), "evaluate_every_steps": 4})
    assert task.steps == 4
    assert list(folder.iterdir()) == []
