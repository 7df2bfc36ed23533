"""Whole runs in this process: what a run decides at its start, its end, and when it is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import pack_arrays
from hpctrain.errors import CheckpointError, DataError, DivergedError, LaunchError, RecipeError, StoppedEarly
from hpctrain.resilience import StopRequest
from hpctrain.run import parse_recipe
from hpctrain.run.compute.device import Proposal, choose_device, decide, propose
from hpctrain.run.training import Resume, carry_out
from hpctrain.telemetry import read_records
from tests.sessions import session_over

SAMPLES = 100


class Task:
    """Logistic regression on digits. Counts its steps; may ask for a stop, fail in evaluation, or diverge."""

    def __init__(self, *, stop_after: int = 0, fail_in_metrics: bool = False, nan: bool = False) -> None:
        self.stop = StopRequest()
        self.stop_after = stop_after
        self.fail_in_metrics = fail_in_metrics
        self.nan = nan
        self.steps = 0
        self.seen: list[int] = []
        self.precisions: set[torch.dtype] = set()

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.steps += 1
        self.seen += fields["id"].tolist()
        if self.steps == self.stop_after:
            self.stop.request("test")
        logits = model(fields["image"])
        self.precisions.add(logits.dtype)
        return functional.cross_entropy(logits.float(), fields["label"]) * (float("nan") if self.nan else 1)

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        if self.fail_in_metrics:
            raise KeyError("a bug in the metrics")
        return {"accuracy": float((model(fields["image"]).argmax(1) == fields["label"]).double().mean())}


@pytest.fixture
def where(tmp_path: Path) -> Path:
    images, labels = load_digits(return_X_y=True)
    pack_arrays(
        tmp_path / "data",
        {
            "image": (images[:SAMPLES] / 16).astype(np.float32),
            "label": labels[:SAMPLES].astype(np.int64),
            "id": np.arange(SAMPLES),
        },
    )
    return tmp_path


def run(
    where: Path, task: Task, *, resume: str = "auto", world: World | None = None, **sections: dict[str, Any]
) -> dict[str, Any]:
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": str(where / "run"), "steps": 10},
        "task": {"target": "tests:Task"},
        "data": {"train": str(where / "data"), "held_out": str(where / "data"), "global_batch": 20},
        "optimizer": {"name": "adamw", "lr": 0.01},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    document["run"] = {k: v for k, v in document["run"].items() if v is not None}
    session = session_over(world or SerialWorld())
    return carry_out(
        parse_recipe(document), task, session=session, resume=Resume.parse(resume), stop=task.stop
    )


def summary(where: Path) -> dict[str, Any]:
    return json.loads((where / "run" / "summary.json").read_text())


def saved_steps(where: Path) -> list[int]:
    return sorted(int(p.stem.split("-")[1]) for p in (where / "run" / "checkpoints").glob("step-*.h5"))


# ---------------------------------------------------------------------- the end of a run


def test_a_bug_in_the_evaluation_loses_no_training_and_the_rerun_finishes(where: Path) -> None:
    with pytest.raises(KeyError):
        run(where, Task(fail_in_metrics=True))
    assert saved_steps(where) == [10]
    again = Task()
    found = run(where, again)
    assert again.steps == 0
    assert found["status"] == summary(where)["status"] == "finished"
    assert found["quality"]["accuracy"] > 0.3


def test_a_stop_in_the_last_step_finishes_the_run(where: Path) -> None:
    assert run(where, Task(stop_after=10))["status"] == "finished"
    assert summary(where)["quality"]


def test_a_finished_run_is_left_as_it_is(where: Path) -> None:
    before = run(where, Task())
    stamp = (where / "run" / "summary.json").stat().st_mtime_ns
    assert run(where, Task()) == json.loads(json.dumps(before))
    assert (where / "run" / "summary.json").stat().st_mtime_ns == stamp


def test_a_stopped_and_a_diverged_run_have_their_summary(where: Path) -> None:
    with pytest.raises(StoppedEarly):
        run(where, Task(stop_after=4))
    assert (summary(where)["status"], summary(where)["step"]) == ("stopped", 4)
    with pytest.raises(DivergedError):
        run(where, Task(nan=True), optimizer={"max_skipped_in_row": 2})
    assert (summary(where)["status"], summary(where)["skipped_steps"]) == ("diverged", 2)


# ---------------------------------------------------------------------- resuming


@pytest.mark.parametrize(("before", "after"), [(20, 50), (50, 20), (20, 20)])
def test_epochs_end_with_their_last_sample_also_with_another_batch(
    where: Path, before: int, after: int
) -> None:
    first, second = Task(stop_after=2), Task()
    epochs = {"steps": None, "epochs": 2}
    with pytest.raises(StoppedEarly):
        run(where, first, run=epochs, data={"global_batch": before})
    run(where, second, run=epochs, data={"global_batch": after})
    assert sorted(first.seen + second.seen) == sorted(list(range(SAMPLES)) * 2)


def test_the_last_smaller_batch_is_dropped_where_asked(where: Path) -> None:
    task = Task()
    run(where, task, run={"steps": None, "epochs": 3}, data={"global_batch": 30, "last_batch": "drop"})
    assert task.steps == 9
    assert len(task.seen) == 270


def test_a_branch_from_an_older_checkpoint_goes_on_by_itself(where: Path) -> None:
    run(where, Task(), checkpoint={"every_steps": 2, "keep": 9})
    old = where / "run" / "checkpoints" / "step-00000004.h5"
    with pytest.raises(StoppedEarly):
        run(where, Task(stop_after=1), resume=str(old), optimizer={"lr": 0.001})
    assert saved_steps(where) == [2, 4, 5]  # 6, 8 and 10 are of the other branch
    assert sorted(p.name for p in (where / "run" / "previous-1").iterdir()) == [
        f"step-{step:08}.h5" for step in (6, 8, 10)
    ]
    last = Task()
    assert run(where, last, optimizer={"lr": 0.001})["resumed_from"].endswith("step-00000005.h5")
    assert last.steps == 5


def test_a_changed_option_counts_after_a_resume(where: Path) -> None:
    """Weight decay so strong that nothing is left of the weights."""
    with pytest.raises(StoppedEarly):
        run(where, Task(stop_after=5), optimizer={"weight_decay": 0.0})
    with_decay = run(where, Task(), optimizer={"weight_decay": 99.0})
    assert with_decay["loss"] > 2.2  # log 10 = 2.30: as good as guessing


def test_the_state_of_another_optimizer_is_refused(where: Path) -> None:
    run(where, Task())
    with pytest.raises(CheckpointError, match="state of AdamW, this run's optimizer is SGD"):
        run(where, Task(), run={"steps": 20}, optimizer={"name": "sgd"})


def test_a_named_checkpoint_that_is_not_there_is_an_error(where: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        run(where, Task(), resume=str(where / "nothing"))


# ---------------------------------------------------------------------- ranks that were told differently


def test_ranks_with_different_recipes_are_refused(where: Path) -> None:
    def case(world: World) -> str:
        try:
            run(where, Task(), world=world, optimizer={"lr": 0.01 * (1 + world.rank)})
        except RecipeError as error:
            return str(error)
        return "no error"

    texts = run_threads(2, case, timeout_s=60)
    assert texts[0] == texts[1]
    assert "section [optimizer] of the recipe must be the same on every rank" in texts[0]


def test_ranks_with_different_data_are_refused(where: Path) -> None:
    """As with a copy on each node's own disk, one of them old."""
    fields = {"image": np.zeros((SAMPLES, 64), np.float32), "label": np.zeros(SAMPLES, np.int64)}
    pack_arrays(where / "old", {**fields, "id": np.arange(SAMPLES)})

    def case(world: World) -> str:
        session = session_over(world, nodes=["a", "b"])
        try:
            session.open_dataset(where / ("data" if world.rank == 0 else "old"))
        except DataError as error:
            return str(error)
        return "no error"

    texts = run_threads(2, case, timeout_s=60)
    for text in texts:
        assert "must be the same on every rank: rank 0" in text


# ---------------------------------------------------------------------- records and precision


def test_records_hold_what_the_docs_say_and_no_secrets(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "hush")
    run(where, Task(), telemetry={"evaluate_every_steps": 4}, checkpoint={"every_minutes": 1e-9})
    records = list(read_records(where / "run" / "metrics" / "rank-00000.jsonl"))
    step = next(r for r in records if r["kind"] == "step")
    assert {"time", "step", "epoch", "samples", "loss", "lr", "grad_norm", "seconds"} <= set(step)
    assert {"step", "compute", "sync", "exposed_sync", "input", "checkpoint"} == set(step["seconds"])
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [4, 8, 10]
    assert len([r for r in records if r["kind"] == "checkpoint"]) == 10  # the clock says so after every step
    for path in (where / "run").rglob("*.json*"):
        assert "hush" not in path.read_text()
    starts = list(read_records(where / "run" / "starts.jsonl"))
    assert starts[0]["environment"]["packages"]["torch"] == torch.__version__
    assert starts[0]["recipe"]["optimizer"]["lr"] == 0.01


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("fp64", torch.float64), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_precision_is_that_of_the_recipe(where: Path, precision: str, dtype: torch.dtype) -> None:
    task = Task()
    found = run(where, task, run={"precision": precision})
    assert task.precisions == {dtype}
    assert found["loss"] < 2.3


class Regression(Task):
    """Converts nothing: images float32 in the dataset, targets float16, labels int64."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[tuple[torch.dtype, ...]] = set()
        self.model: torch.nn.Module = torch.nn.Identity()

    def build_model(self) -> torch.nn.Module:
        self.model = super().build_model()
        for parameter in self.model.parameters():  # ranks that are threads share one random generator
            torch.nn.init.constant_(parameter, 0.01)
        return self.model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.dtypes.add(tuple(fields[name].dtype for name in ("image", "target", "label")))
        return functional.mse_loss(model(fields["image"])[:, 0], fields["target"])

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"loss": float(self.loss(model, fields).detach())}


def half_precision_targets(where: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A dataset in where/data of images, targets and labels; images and targets as they are stored."""
    images, labels = load_digits(return_X_y=True)
    image, target = (images[:SAMPLES] / 17).astype(np.float32), (labels[:SAMPLES] / 7).astype(np.float16)
    shutil.rmtree(where / "data", ignore_errors=True)
    pack_arrays(
        where / "data", {"image": image, "target": target, "label": labels[:SAMPLES].astype(np.int64)}
    )
    return torch.from_numpy(image), torch.from_numpy(target)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_task_that_converts_nothing_trains_in_float64_as_torch_alone_does(
    where: Path, num_ranks: int
) -> None:
    image, target = half_precision_targets(where)
    sections = {
        "run": {"precision": "fp64"}, "optimizer": {"name": "sgd", "lr": 0.1, "schedule": "constant"},
        "data": {"order": "sequential"},
    }  # fmt: skip
    tasks = [Regression() for _ in range(num_ranks)]
    found = run_threads(num_ranks, lambda world: run(where, tasks[world.rank], world=world, **sections))

    def loss_of(model: torch.nn.Module, samples: slice) -> torch.Tensor:
        return functional.mse_loss(model(image[samples].double())[:, 0], target[samples].double())

    alone = Regression().build_model().double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(alone, slice(20 * (step % 5), 20 * (step % 5) + 20)).backward()
        optimizer.step()
    expected = float(loss_of(alone, slice(None)).detach())
    for rank, task in enumerate(tasks):
        assert task.dtypes == {(torch.float64, torch.float64, torch.int64)}
        for mine, theirs in zip(task.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-13, atol=1e-15)
        assert found[rank]["quality"]["loss"] == pytest.approx(expected, rel=1e-13)


def test_stored_floats_of_another_width_come_in_the_dtype_of_the_model(where: Path) -> None:
    half_precision_targets(where)
    task = Regression()
    run(where, task)
    assert task.dtypes == {(torch.float32, torch.float32, torch.int64)}


def test_evaluation_on_a_part_is_of_the_same_samples_each_time(where: Path) -> None:
    part = {"evaluation_samples": 30, "evaluation_batch": 10}
    first = run(where, Task(), data=part)
    again = run(where, Task(), resume="never", data=part)
    whole = run(where, Task(), resume="never")
    assert first["quality"] == again["quality"]
    assert first["quality"]["accuracy"] * 30 == pytest.approx(round(first["quality"]["accuracy"] * 30))
    assert whole["quality"] != first["quality"]


# ---------------------------------------------------------------------- devices


def gpu(host: str, index: int, uuid: str) -> Proposal:
    return Proposal(host=host, index=index, uuid=uuid)


def test_every_rank_with_a_gpu_of_its_own_uses_it() -> None:
    own = [gpu("a", 0, "u0"), gpu("a", 1, "u1"), gpu("b", 0, "u0")]
    assert decide(own, asked="auto") is None
    assert decide(own, asked="cuda") is None


@pytest.mark.parametrize(
    ("proposals", "text"),
    [
        ([gpu("a", 0, "u0"), gpu("a", 0, "u0")], "ranks 0 and 1 on a have the same GPU"),
        ([gpu("a", 0, "u0"), Proposal(host="b", index=None, reason="no CUDA")], "rank 1 on b: no CUDA"),
    ],
)
def test_otherwise_all_ranks_use_the_cpu_or_the_run_is_refused(proposals: list[Proposal], text: str) -> None:
    assert decide(proposals, asked="auto") == text
    with pytest.raises(LaunchError, match=text):
        decide(proposals, asked="cuda")


def test_a_named_gpu_is_shared_by_the_ranks_of_a_machine_and_must_be_there_on_all() -> None:
    shared = [gpu("a", 0, "u0"), gpu("a", 0, "u0")]
    assert decide(shared, asked="cuda:0") is None
    missing = [gpu("a", 1, "u1"), Proposal(host="b", index=None, reason="it sees 1 CUDA device(s)")]
    with pytest.raises(LaunchError, match=r"run\.device = 'cuda:1', but rank 1 on b: it sees 1"):
        decide(missing, asked="cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("asked", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_refused(asked: str) -> None:
    with pytest.raises(
        LaunchError, match=rf"run\.device = '{asked}', but rank 0 on here: torch finds no CUDA device"
    ):
        choose_device(asked, comm=SerialWorld(), host="here", host_rank=0)
    with pytest.raises(LaunchError, match="device 'gpu': give auto, cpu, cuda"):
        choose_device("gpu", comm=SerialWorld(), host="here", host_rank=0)


class _OldProperties:
    """What torch before 2.5 says of a device: no uuid."""


def test_a_gpu_is_told_apart_also_by_a_torch_that_gives_no_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _OldProperties())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 7")
    assert [propose(host="a", host_rank=rank).uuid for rank in (0, 1)] == ["3", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [propose(host="a", host_rank=rank).uuid for rank in (0, 1)] == ["0", "1"]
    assert propose(host="a", host_rank=2).reason == "2 CUDA devices for at least 3 ranks"
    assert propose(host="a", host_rank=1, number=0) == gpu("a", 0, "0")
    assert propose(host="a", host_rank=0, number=2).index is None
