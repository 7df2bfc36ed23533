"""Averages of the parameters: those of torch's AveragedModel, of any number of ranks, saved, resumed and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpctrain.checkpoint import Checkpoint, export_state_dict, open_checkpoint
from hpctrain.comm import SerialWorld, World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import RecipeError, UsageError
from hpctrain.run import parse_recipe
from hpctrain.train import Ema, Position
from tests.sessions import session_over
from tests.unit.run.training_cases import Task, run


class Normed(Task):
    """With batch normalisation and a weight of two names. It keeps the model, to compare with torch's average of it."""

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 10)
        )  # fmt: skip
        model.append(torch.nn.Linear(10, 10, bias=False))
        model[4].weight = model[3].weight
        self.model = model
        return model


class Compared(Normed):
    """Updates torch's AveragedModel where the run updates its own: at the first loss after each step."""

    average: AveragedModel | None = None

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.steps == 1:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        if self.steps and self.average is not None:
            self.average.update_parameters(model)
        return super().loss(model, fields)


def newest(where: Path) -> Checkpoint:
    return open_checkpoint(where / "run/checkpoints", comm=SerialWorld())


def averages(where: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest(where)
    return {name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith("ema/")}


EMA: dict[str, Any] = {"name": "sgd", "lr": 0.05, "ema": 0.8}


def test_the_averages_are_those_of_torch_and_the_run_is_the_same(where: Path, tmp_path: Path) -> None:
    task = Compared()
    best = {"checkpoint": {"keep_best": "ema_accuracy:max"}, "telemetry": {"evaluate_every_steps": 4}}
    summary = run(where, task, optimizer=EMA, **best)
    assert task.average is not None
    task.average.update_parameters(task.model)  # after the last step
    found = averages(where)
    expected = task.average.module.state_dict()
    assert found.keys() == {f"ema/{name}" for name in expected}
    for name, tensor in task.model.named_parameters():
        assert torch.equal(found[f"ema/{name}"], expected[name]), name
        assert not torch.equal(found[f"ema/{name}"], tensor)
    for name, tensor in task.model.named_buffers():
        assert torch.equal(found[f"ema/{name}"], tensor), name
    quality = newest(where).document["quality"]
    assert quality.keys() == {"accuracy", "ema_accuracy"}
    assert summary["status"] == "finished"
    export_state_dict(newest(where).path, tmp_path / "ema.pt", comm=SerialWorld(), prefix="ema/")
    Normed().build_model().load_state_dict(torch.load(tmp_path / "ema.pt", weights_only=True))
    with_it = {name: value.clone() for name, value in task.model.state_dict().items()}

    plain = Normed()
    run(where, plain, optimizer={**EMA, "ema": None}, run={"directory": str(where / "plain")})
    assert all(torch.equal(with_it[name], value) for name, value in plain.model.state_dict().items())


def test_a_stopped_run_continues_to_the_bit_and_three_ranks_average_as_one(where: Path) -> None:
    def trained(task: Task, name: str, ranks: int = 1, **sections: Any) -> dict[str, torch.Tensor]:
        sections = {
            "run": {"directory": str(where / name / "run"), "precision": "fp64"},
            "optimizer": EMA,
            **sections,
        }
        if ranks == 1:
            run(where, task, **sections)
        else:
            run_threads(ranks, lambda world: run(where, Task(), world=world, **sections), timeout_s=300)
        return averages(where / name)

    whole = trained(Task(), "whole")
    half = {"run": {"directory": str(where / "half" / "run"), "precision": "fp64", "steps": 5}}
    trained(Task(), "half", **half)
    assert newest(where / "half").document["ema"] == {"num_updates": 5}
    again = trained(Task(), "half")
    assert newest(where / "half").document["ema"] == {"num_updates": 10}
    assert whole.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    for ranks, shard in ((3, "none"), (2, "optimizer"), (2, "gradients")):
        found = trained(Task(), f"{ranks}-{shard}", ranks, parallel={"shard": shard})
        for name, tensor in whole.items():
            assert torch.allclose(found[name], tensor, rtol=0, atol=1e-10), (ranks, shard, name)


def test_averages_begin_where_a_run_without_them_is_continued(where: Path) -> None:
    run(where, Task(), run={"steps": 4})
    run(where, Task(), optimizer={"ema": 0.5}, run={"steps": 7})
    assert newest(where).document["ema"] == {"num_updates": 3}
    run(where, Task(), run={"steps": 9})
    assert "ema" not in newest(where).document


def test_a_step_that_is_skipped_is_not_averaged(where: Path) -> None:
    class Once(Task):
        def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().loss(model, fields) * (float("inf") if self.steps == 3 else 1)

    run(where, Once(), optimizer=EMA)
    assert newest(where).document["ema"] == {"num_updates": 9}


@pytest.mark.parametrize("decay", [0, 1, -0.1, 2])
def test_a_decay_is_between_0_and_1(decay: float) -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        Ema(torch.nn.Linear(1, 1), decay=decay)
    document: Any = {
        "run": {"directory": "x", "steps": 1},
        "task": {"target": "a:B"},
        "data": {"train": "d", "global_batch": 1},
    }
    with pytest.raises(RecipeError, match=r"optimizer\.ema"):
        parse_recipe({**document, "optimizer": {"ema": decay}})


def test_an_own_loop_saves_averages_and_torch_reads_them(tmp_path: Path) -> None:
    def loop(world: World, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        session = session_over(world)
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        model = model.to(torch.bfloat16)
        updater = session.distributed_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ema = Ema(model, decay=0.9)
        begin = session.load_state(tmp_path, updater, also={"ema": ema}).step
        for _ in range(steps):
            updater.backward(
                model(torch.eye(4, 3, dtype=torch.bfloat16)).square().mean(), weight=1 / world.num_ranks
            )
            updater.step()
            ema.update()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with ema.applied():
            assert not torch.equal(before["0.weight"], model[0].weight)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        session.save_state(tmp_path, updater, Position(step=begin + steps), also={"ema": ema})
        session.close()
        found = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
        AveragedModel(model.float()).load_state_dict(found)
        return found, before

    run_threads(2, lambda world: loop(world, 3), timeout_s=300)
    (averages, _), _ = run_threads(2, lambda world: loop(world, 2), timeout_s=300)
    assert averages["n_averaged"] == 5
    assert averages["module.0.weight"].dtype == torch.float32
    checkpoint = open_checkpoint(tmp_path, comm=SerialWorld())
    assert torch.equal(checkpoint.read("also/ema/module.0.weight"), averages["module.0.weight"])
