"""Checkpoints of whole runs in this process: in the background, on demand, the best, through two tiers."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hpctrain.checkpoint import load, open_checkpoint
from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.retention.policy import advise
from hpctrain.checkpoint.saving.saver import FILE_NAME
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import CheckpointError, RecipeError, StoppedEarly
from hpctrain.resilience import CheckpointSignal, StopRequest
from hpctrain.run import parse_recipe
from hpctrain.run.initial_state import renamed
from hpctrain.telemetry import read_records
from hpctrain.train import CheckpointPolicy
from tests.run_files import records_of, saved_steps
from tests.unit.run.training_cases import run

STEPS = 10
BACKGROUND = {"mode": "async", "limit_mb_per_s": 0.05}  # 24 kB: half a second, many steps long


class Task:
    """A small classifier of digits. `at` maps steps of this process to what happens in them."""

    def __init__(self, at: dict[int, Callable[[], object]] | None = None, *, name: str = "layer") -> None:
        self.stop = StopRequest()
        self.at = at or {}
        self.name = name
        self.steps = 0

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential()  # replaced below: the layer's name is the test's

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.steps += 1
        self.at.get(self.steps, lambda: None)()
        return functional.cross_entropy(model(fields["image"]), fields["label"])

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"accuracy": float((model(fields["image"]).argmax(1) == fields["label"]).double().mean())}


class Classifier(Task):
    def build_model(self) -> torch.nn.Module:
        layers = {"flat": torch.nn.Flatten(), self.name: torch.nn.Linear(64, 32), "act": torch.nn.Tanh(),
                  "head": torch.nn.Linear(32, 10)}  # fmt: skip
        model = torch.nn.Sequential()
        for name, layer in layers.items():
            model.add_module(name, layer)
        return model


def checkpoints(where: Path, name: str = "run") -> list[Path]:
    return finished_newest_first(where / name / "checkpoints")[::-1]


def same_content(first: Path, second: Path) -> bool:
    a, b = (load(path, comm=SerialWorld())[1] for path in (first, second))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------- in the background


def test_in_the_background_the_same_is_saved_and_training_goes_on_meanwhile(where: Path) -> None:
    run(where, Classifier(), name="sync", checkpoint={"every_steps": 4, "keep": 9})
    run(where, Classifier(), name="async", checkpoint={"every_steps": 4, "keep": 9, **BACKGROUND})
    assert saved_steps(where / "sync") == saved_steps(where / "async") == [4, 8, 10]
    for first, second in zip(checkpoints(where, "sync"), checkpoints(where, "async"), strict=True):
        assert same_content(first, second)
    at_once, later = records_of(where / "sync", "checkpoint"), records_of(where / "async", "checkpoint")
    assert [r["step"] for r in later] == [4, 8, 10]
    for record in (*at_once, *later):
        assert record["mb_per_s"] == pytest.approx(record["bytes"] / 1e6 / record["write_seconds"])
    assert {record["buffer_bytes"] for record in at_once} == {0}
    assert all(0 < record["buffer_bytes"] <= record["bytes"] for record in later)
    assert later[0]["stall_seconds"] < later[0]["write_seconds"]
    # Step 5 was done, and recorded, before the checkpoint of step 4 was committed.
    kinds = [(r["kind"], r["step"]) for r in read_records(where / "async" / "metrics" / "rank-00000.jsonl")]
    assert kinds.index(("step", 5)) < kinds.index(("checkpoint", 4))
    assert run(where, Classifier(), name="async")["checkpoints_written"] == 3  # finished: as it was


def test_stopped_in_the_middle_of_a_background_save_it_resumes_as_if_never_stopped(where: Path) -> None:
    whole = run(where, Classifier(), name="whole", checkpoint={"every_steps": 4, **BACKGROUND})
    task = Classifier()
    task.at = {6: lambda: task.stop.request("test")}
    with pytest.raises(StoppedEarly):
        run(where, task, checkpoint={"every_steps": 4, **BACKGROUND})
    assert saved_steps(where / "run") == [4, 6]
    resumed = run(where, Classifier(), checkpoint={"every_steps": 4, **BACKGROUND})
    assert resumed["resumed_from"].endswith("step-00000006.h5")
    assert resumed["loss"] == whole["loss"]
    assert same_content(checkpoints(where)[-1], checkpoints(where, "whole")[-1])


def test_where_one_is_still_being_written_the_next_is_skipped_as_asked_but_not_the_last(where: Path) -> None:
    run(where, Classifier(), checkpoint={"every_steps": 1, "when_busy": "skip", "keep": 9, **BACKGROUND})
    steps = saved_steps(where / "run")
    assert steps[0] == 1
    assert steps[-1] == STEPS
    skipped = [record["step"] for record in records_of(where / "run", "checkpoint_skipped")]
    assert {*steps, *skipped} == set(range(1, STEPS + 1))
    assert len(skipped) > 3


def test_an_error_in_the_background_ends_the_run_with_it(where: Path) -> None:
    directory = where / "run" / "checkpoints"

    def lose() -> None:
        directory.rename(where / "lost")

    with pytest.raises(CheckpointError, match="checkpoints"):
        run(where, Classifier({5: lose}), checkpoint={"every_steps": 4, **BACKGROUND})
    assert finished_newest_first(where / "lost") == []


# ---------------------------------------------------------------------- when


def test_a_file_in_the_run_directory_asks_for_a_checkpoint(where: Path) -> None:
    (where / "run").mkdir()
    (where / "run" / FILE_NAME).touch()
    run(where, Classifier())
    assert saved_steps(where / "run") == [1, STEPS]
    assert not (where / "run" / FILE_NAME).exists()


def test_a_signal_asks_for_a_checkpoint(where: Path) -> None:
    save_signal = CheckpointSignal().install()
    try:
        task = Classifier({4: lambda: os.kill(os.getpid(), signal.SIGUSR2)})
        run(where, task, save_signal=save_signal)
    finally:
        save_signal.restore()
    assert saved_steps(where / "run") == [4, STEPS]


def test_what_was_asked_for_waits_where_others_are_skipped(where: Path) -> None:
    save_signal = CheckpointSignal().install()
    try:
        task = Classifier({4: lambda: os.kill(os.getpid(), signal.SIGUSR2)})
        section = {"every_steps": 3, "when_busy": "skip", "keep": 9, **BACKGROUND}
        run(where, task, save_signal=save_signal, checkpoint=section)
    finally:
        save_signal.restore()
    assert saved_steps(where / "run")[:2] == [3, 4]


def test_by_advice_the_first_is_due_after_a_minute_and_the_next_as_its_cost_says() -> None:
    policy = CheckpointPolicy(directory=Path(), by_advice=True, failures_per_day=1.0)
    assert not policy.due_by_time(59.0)
    assert policy.due_by_time(60.0)
    advice = advise(cost_s=0.5, write_s=0.5, failures_per_day=1.0)  # 294 s
    assert not policy.due_by_time(290.0, advice=advice)
    assert policy.due_by_time(295.0, advice=advice)
    assert not CheckpointPolicy(directory=Path(), failures_per_day=1.0).due_by_time(1e9, advice=advice)


def test_the_interval_that_loses_least_is_reported_and_recorded(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(where, Classifier(), checkpoint={"every_steps": 3, "failures_per_day": 2.0})
    reported = capsys.readouterr().out
    assert reported.count("a failure comes every 12 h: save every") == 1
    assert all(record["advised_interval_s"] > 0 for record in records_of(where / "run", "checkpoint"))


# ---------------------------------------------------------------------- what is kept


def test_the_best_by_the_evaluation_is_kept(where: Path) -> None:
    run(
        where,
        Classifier(),
        run={"steps": 20},
        optimizer={"lr": 0.3},  # so high that it is not the last one which is best
        telemetry={"evaluate_every_steps": 2},
        checkpoint={"every_steps": 2, "keep": 1, "keep_best": "accuracy:max"},
    )
    quality = {
        record["step"]: record["quality"]["accuracy"] for record in records_of(where / "run", "evaluation")
    }
    best = max(quality, key=lambda step: (quality[step], -step))
    assert best < 20
    assert saved_steps(where / "run") == [best, 20]
    for path in checkpoints(where):
        document = open_checkpoint(path, comm=SerialWorld()).document
        step = document["position"]["step"]
        # Evaluated before it was saved; the last one was saved again with its quality.
        assert document["quality_step"] == step
        assert document["quality"] == {"accuracy": quality[step]}


def test_every_nth_is_kept_besides(where: Path) -> None:
    run(where, Classifier(), checkpoint={"every_steps": 1, "keep": 2, "keep_every": 4})
    assert saved_steps(where / "run") == [4, 8, 9, 10]


# ---------------------------------------------------------------------- where from


def test_a_run_starts_from_the_weights_of_another_under_other_names(where: Path) -> None:
    first = run(where, Classifier(), name="first")
    still = {"lr": 1e-30, "weight_decay": 0.0}
    options = {"weights_from": str(where / "first" / "checkpoints"), "weights_map": {"layer.": "body."}}
    second = run(where, Classifier(name="body"), name="second", optimizer=still, checkpoint=options)
    assert second["quality"] == first["quality"]
    assert second["resumed_from"] is None
    with pytest.raises(CheckpointError, match=r"body\.weight"):
        run(where, Classifier(name="body"), name="third", checkpoint={**options, "weights_map": {}})
    loose = {**options, "weights_map": {}, "weights_strict": False}
    assert run(where, Classifier(name="body"), name="fourth", checkpoint=loose)["status"] == "finished"


def test_a_run_that_resumes_has_weights_of_its_own(where: Path) -> None:
    run(where, Classifier(), name="other", optimizer={"lr": 0.1})
    options = {"weights_from": str(where / "other" / "checkpoints")}
    whole = run(where, Classifier(), name="whole", checkpoint=options)
    task = Classifier()
    task.at = {5: lambda: task.stop.request("test")}
    with pytest.raises(StoppedEarly):
        run(where, task, checkpoint=options)
    shutil.rmtree(where / "other")  # not needed any more
    assert run(where, Classifier(), checkpoint=options)["loss"] == whole["loss"]


def test_a_run_branches_off_from_an_older_checkpoint_that_is_a_folder(where: Path) -> None:
    section = {"every_steps": 2, "keep": 9, "local": str(where / "local")}
    run(where, Classifier(), checkpoint=section)
    task = Classifier()
    task.at = {1: lambda: task.stop.request("test")}
    with pytest.raises(StoppedEarly):
        run(where, task, resume=str(checkpoints(where)[1]), checkpoint=section)
    assert saved_steps(where / "run") == [2, 4, 5]
    moved = sorted(path.name for path in (where / "run" / "previous-1").iterdir())
    assert moved == [f"step-{step:08}" for step in (6, 8, 10)]
    # What the nodes still hold of the other branch is not recovered.
    assert run(where, Classifier(), checkpoint=section)["resumed_from"].endswith("step-00000005")


def test_the_longest_beginning_of_a_name_counts() -> None:
    mapping = {"encoder.": "body.", "encoder.head.": "head."}
    assert renamed("encoder.layer.weight", mapping=mapping) == "body.layer.weight"
    assert renamed("encoder.head.bias", mapping=mapping) == "head.bias"
    assert renamed("decoder.bias", mapping=mapping) == "decoder.bias"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_through_two_tiers_a_lost_shared_folder_is_recovered_from_the_node(where: Path, mode: str) -> None:
    section = {"every_steps": 4, "local": str(where / "local"), "mode": mode}
    whole = run(where, Classifier(), name="whole", checkpoint=section)
    assert [path.name for path in checkpoints(where, "whole")] == [
        f"step-{step:08}" for step in (4, 8, 10)
    ]  # folders, one file per node
    task = Classifier()
    task.at = {6: lambda: task.stop.request("test")}
    with pytest.raises(StoppedEarly):
        run(where, task, checkpoint=section)
    for path in checkpoints(where):
        shutil.rmtree(path)
    resumed = run(where, Classifier(), checkpoint=section)
    assert resumed["resumed_from"].endswith("step-00000006")
    assert resumed["loss"] == whole["loss"]


# ---------------------------------------------------------------------- recipes that make no sense


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"every": "auto"}, "needs failures_per_day"),
        ({"every": "auto", "failures_per_day": 1.0, "every_minutes": 5.0}, "leave one of the two out"),
        ({"when_busy": "skip"}, "needs mode = 'async'"),
        ({"keep_best": "loss"}, "write METRIC:min or METRIC:max"),
        ({"keep_best": "loss:min"}, "needs data.held_out and telemetry.evaluate_every_steps"),
        ({"files": 0}, 'a number of at least 1, or "node"'),
        ({"files": "nodes"}, "files"),
        ({"local": "/tmp/x", "files": 3}, "leave files out"),
        ({"engine": "mpio", "mode": "async"}, "writes with all ranks at once"),
        ({"engine": "mpio", "limit_mb_per_s": 3.0}, "writes with all ranks at once"),
        ({"weights_map": {"a": "b"}}, "need weights_from"),
    ],
)
def test_what_does_not_fit_together_is_refused(section: dict[str, Any], text: str) -> None:
    document = {
        "run": {"directory": "runs/x", "epochs": 2},
        "task": {"target": "tasks:Task"},
        "data": {"train": "data/x", "global_batch": 8},
        "checkpoint": section,
    }
    with pytest.raises(RecipeError, match=text):
        parse_recipe(document)
