"""What a run records, and the precision in which it computes."""

from __future__ import annotations

import importlib.metadata
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
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import pack_arrays
from hpctrain.run.training import records_steps
from hpctrain.telemetry import CLOCK_KEYS, read_records
from tests.sessions import session_over
from tests.unit.run.training_cases import SAMPLES, Task, run


def test_records_hold_what_the_docs_say_and_no_secrets(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "hush")
    run(where, Task(), telemetry={"evaluate_every_steps": 4}, checkpoint={"every_minutes": 1e-9})
    records = list(read_records(where / "run" / "metrics" / "rank-00000.jsonl"))
    step = next(r for r in records if r["kind"] == "step")
    assert {"time", "step", "epoch", "samples", "loss", "lr", "grad_norm", "seconds"} <= set(step)
    usual = {"step", *CLOCK_KEYS, "other", "after_sync", "sync", "hidden_sync"}
    assert set(step["seconds"]) == usual | {"own_write"}  # the last only where a checkpoint was committed
    evaluated = next(r for r in records if r["kind"] == "step" and r["step"] == 4)["seconds"]
    assert evaluated["evaluation"] > step["seconds"]["evaluation"] == 0.0
    for seconds in (r["seconds"] for r in records if r["kind"] == "step"):
        assert sum(seconds[part] for part in (*CLOCK_KEYS, "other")) == pytest.approx(
            seconds["step"], rel=1e-9
        )
        assert seconds["evaluation"] + seconds["checkpoint"] < seconds["after_sync"] < seconds["step"]
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [4, 8, 10]
    assert len([r for r in records if r["kind"] == "checkpoint"]) == 10  # the clock says so after every step
    for path in (where / "run").rglob("*.json*"):
        assert "hush" not in path.read_text()
    starts = list(read_records(where / "run" / "starts.jsonl"))
    assert starts[0]["environment"]["packages"]["torch"] == importlib.metadata.version("torch")
    assert starts[0]["recipe"]["optimizer"]["lr"] == 0.01


@pytest.mark.parametrize(
    ("ranks", "expected"), [("auto", [0, 1, 2]), ("all", [0, 1, 2]), ("node", [0, 2]), ("rank0", [0])]
)
def test_the_ranks_that_the_recipe_names_record_their_steps_and_all_count_in_the_nodes_summary(
    where: Path, ranks: str, expected: list[int]
) -> None:
    def case(world: World) -> dict[str, Any]:
        return run(where, Task(), world=world, nodes=["a", "a", "b"], telemetry={"ranks": ranks})

    summaries = run_threads(3, case, timeout_s=300)
    files = sorted((where / "run" / "metrics").iterdir())
    assert [path.name for path in files] == [f"rank-{rank:05}.jsonl" for rank in expected]
    for path in files:
        assert [r["step"] for r in read_records(path) if r["kind"] == "step"] == list(range(1, 11))
    a, b = json.loads((where / "run" / "nodes.json").read_text())
    assert (a["node"], a["ranks"], b["node"], b["ranks"]) == ("a", "0-1", "b", "2")
    assert a["largest"]["step"]["seconds"] >= a["mean"]["step"] > 0
    assert b["largest"]["step"] == {"seconds": b["mean"]["step"], "rank": 2}
    mean = (2 * a["mean"]["step"] + b["mean"]["step"]) / 3
    assert summaries[0]["seconds"]["step"] == pytest.approx(mean)


def test_of_more_than_64_ranks_the_first_of_each_node_records_by_default() -> None:
    def case(world: World) -> tuple[bool, bool]:
        session = session_over(world, nodes=[f"n{rank // 5}" for rank in range(world.num_ranks)])
        return records_steps("auto", session=session), records_steps("all", session=session)

    for num_ranks in (64, 65):
        found = run_threads(num_ranks, case, timeout_s=300)
        assert [auto for auto, _ in found] == [num_ranks == 64 or rank % 5 == 0 for rank in range(num_ranks)]
        assert all(every for _, every in found)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("fp64", torch.float64), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_precision_is_that_of_the_recipe(where: Path, precision: str, dtype: torch.dtype) -> None:
    task = Task()
    found = run(where, task, run={"precision": precision})
    assert task.precisions == {dtype}
    assert found["loss"] < 2.3


@pytest.mark.parametrize(("precision", "relative"), [("bf16", 2e-2), ("fp16", 5e-3)])
def test_losses_with_autocast_are_those_of_fp32_but_for_rounding(
    where: Path, precision: str, relative: float
) -> None:
    losses = {}
    for name in ("fp32", precision):
        run(where, Task(), name=name, run={"precision": name, "steps": 20})
        records = read_records(where / name / "metrics" / "rank-00000.jsonl")
        losses[name] = [record["loss"] for record in records if record["kind"] == "step"]
    assert losses[precision] == pytest.approx(losses["fp32"], rel=relative)
    assert losses[precision] != losses["fp32"]
    assert losses[precision][-1] < 0.9 * losses[precision][0]


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
