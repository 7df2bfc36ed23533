"""Optimizers and schedules of a recipe: by name, or the user's own; saved and restored with all that they hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from hpctrain.comm import SerialWorld
from hpctrain.errors import RecipeError
from hpctrain.run.build import build_decay, build_optimizer, check_recipe_optimizer
from hpctrain.run.recipe.parallel_schema import ParallelSection
from hpctrain.run.recipe.schema import OptimizerSection
from hpctrain.train import Position, Schedule
from hpctrain.train.task.schedule import LR_SCALE
from tests.sessions import session_over

HERE = "tests.unit.run.test_optimizers"


def slower_biases(model: torch.nn.Module, *, lr: float, nesterov: bool = False) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "lr": lr},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": lr / 4},
    ]
    return torch.optim.SGD(groups, momentum=0.9, nesterov=nesterov)


def no_optimizer(model: torch.nn.Module, *, lr: float) -> str:
    return "none"


def failing(model: torch.nn.Module, *, lr: float) -> torch.optim.Optimizer:
    raise KeyError("beta")


def half_way(step: int, num_steps: int) -> float:
    return 1.0 if step < num_steps // 2 else 0.5


def a_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2)).double()


def with_gradients(model: torch.nn.Module) -> torch.nn.Module:
    for number, parameter in enumerate(model.parameters(), start=1):
        values = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
        parameter.grad = torch.sin(values + number)
    return model


def test_lars_scales_each_layer_by_its_norms() -> None:
    """One step against the formula of arXiv:1708.03888; biases are stepped as by SGD."""
    lr, decay = 0.5, 0.01
    model, before = with_gradients(a_model()), [p.detach().clone() for p in a_model().parameters()]
    section = OptimizerSection(name="lars", lr=lr, weight_decay=decay, momentum=0.9)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    build_optimizer(model, section).step()
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        step = gradient
        if old.ndim > 1:
            ratio = 1e-3 * old.norm() / (gradient.norm() + decay * old.norm())
            step = ratio * (gradient + decay * old)
        torch.testing.assert_close(parameter.detach(), old - lr * step)


def test_lamb_scales_each_layer_by_its_norms() -> None:
    """One step against algorithm 2 of arXiv:1904.00962, without bias correction; norms of parameters up to 10."""
    lr, decay = 0.5, 0.02
    model, before = with_gradients(a_model()), [p.detach().clone() for p in a_model().parameters()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    build_optimizer(model, OptimizerSection(name="lamb", lr=lr, weight_decay=decay)).step()
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        update = (0.1 * gradient) / ((0.001 * gradient**2).sqrt() + 1e-6) + decay * old
        ratio = old.norm().clamp(max=10) / (update.norm() + 1e-6)
        torch.testing.assert_close(parameter.detach(), old - lr * ratio * update)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_release_that_steps_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("hpctrain.run.build.version", lambda _: "3.10.1")
    with pytest.raises(
        RecipeError, match=rf"{name} needs pytorch-optimizer 3.11 or newer. 3.10.1 is installed"
    ):
        build_optimizer(a_model(), OptimizerSection(name=name))


def test_a_class_and_a_function_of_the_user() -> None:
    section = OptimizerSection(target="torch.optim:RMSprop", lr=0.02, options={"alpha": 0.8})
    made = build_optimizer(a_model(), section)
    assert isinstance(made, torch.optim.RMSprop)
    assert [(g["lr"], g["alpha"], LR_SCALE in g) for g in made.param_groups] == [(0.02, 0.8, False)]
    section = OptimizerSection(target=f"{HERE}:slower_biases", lr=0.2, options={"nesterov": True})
    made = build_optimizer(a_model(), section)
    assert [g.get(LR_SCALE, 1.0) for g in made.param_groups] == [1.0, 0.25]


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("torch.optim:Nothing", {}, "cannot be imported"),
        ("not_there.at_all:X", {}, "No module named 'not_there'"),
        ("torch.optim:SGD", {"colour": 3}, "optimizer.options do not fit torch.optim:SGD"),
        ("torch.optim:SGD", {"momentum": -1.0}, "raised ValueError: Invalid momentum value"),
        ("math:pi", {}, "is float, not a class or a function"),
        (f"{HERE}:no_optimizer", {}, "returned str, not a torch.optim.Optimizer"),
        (f"{HERE}:failing", {}, "raised KeyError: 'beta'"),
    ],
)
def test_what_is_wrong_with_a_target_is_said(target: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_optimizer(a_model(), OptimizerSection(target=target, options=options))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"target": "torch.optim:SGD", "momentum": 0.9}, "with target, give these in optimizer.options"),
        ({"options": {"alpha": 1}}, "options apply only with target"),
        ({"schedule": "cosine", "schedule_target": "a:b"}, "not both"),
        ({"name": "lamb", "momentum": 0.9}, "momentum applies only to sgd and lars"),
    ],
)
def test_keys_that_exclude_each_other(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        OptimizerSection(**given)


def test_a_schedule_of_the_user_follows_the_warm_up() -> None:
    decay = build_decay(OptimizerSection(schedule_target=f"{HERE}:half_way"))
    schedule = Schedule(peak_lr=0.8, total_steps=6, warmup_steps=2, decay=decay)
    assert [schedule.lr(step) for step in range(6)] == [0.4, 0.8, 0.8, 0.8, 0.4, 0.4]
    with pytest.raises(RecipeError, match="is float, not a function"):
        build_decay(OptimizerSection(schedule_target="math:pi"))
    with pytest.raises(RecipeError, match="do not fit math:sqrt"):
        build_decay(OptimizerSection(schedule_target="math:sqrt"))
    assert math.isclose(schedule.lr(5), 0.4)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars", "lamb", "slower biases"])
def test_resumed_equals_never_stopped(tmp_path: Path, name: str) -> None:
    """Also what an optimizer keeps in its groups: the LAMB and LARS used here count their steps there."""
    section = (
        OptimizerSection(target=f"{HERE}:slower_biases", lr=0.1)
        if name == "slower biases"
        else OptimizerSection.model_validate({"name": name, "lr": 0.1})
    )

    def train(num_steps: int, *, directory: Path) -> tuple[list[torch.Tensor], list[Any]]:
        session = session_over(SerialWorld())
        model = a_model()
        optimizer = build_optimizer(model, section)
        updater = session.distributed_optimizer(model, optimizer)
        position = session.load_state(directory, updater)
        for step in range(position.step, num_steps):
            torch.manual_seed(step)
            loss = model(torch.randn(8, 5, dtype=torch.float64)).square().mean()
            updater.backward(loss, weight=1.0)
            updater.step()
            position = Position(step=step + 1)
        session.save_state(directory, updater, position)
        session.close()
        counts = [group.get("step") for group in optimizer.param_groups]
        return [p.detach().clone() for p in model.parameters()], counts

    whole, counts = train(6, directory=tmp_path / "whole")
    train(2, directory=tmp_path / "stopped")
    resumed, counts_resumed = train(6, directory=tmp_path / "stopped")
    assert counts == counts_resumed
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("LBFGS", {}),
        ("Adafactor", {"shard": "parameters"}),
        ("Muon", {"shard": "optimizer"}),
        ("Rprop", {"tensor": 2}),
    ],
)
def test_an_optimizer_that_the_layout_excludes_is_refused_when_the_recipe_is_built(
    name: str, parallel: dict[str, Any]
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    model = torch.nn.Linear(4, 2, bias=False)
    with pytest.raises(RecipeError, match=rf"section \[optimizer\]: {name} "):
        check_recipe_optimizer(
            getattr(torch.optim, name)(model.parameters()), ParallelSection(**parallel), model=model
        )
