"""Shares of a stage's optimizer: together they update as the whole one does, and each has a part of its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World
from hpctrain.distributed import element_shard
from hpctrain.errors import UsageError
from hpctrain.reduce.data_parallel.one_pass import OptimizerStep
from hpctrain.reduce.split_models import stage_shares
from hpctrain.reduce.split_models.stage_shares import StageShares, check_stage

RANKS, STEPS, FACTOR = 3, 4, 0.5


class Stage(nn.Module):
    """unused: by no rank. rare: by rank 1 only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(30, 50), nn.Linear(50, 7)
        self.unused, self.rare = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))

    def loss(self, x: torch.Tensor, *, rank: int) -> torch.Tensor:
        loss = self.down(torch.tanh(self.up(x))).square().sum()
        return loss + self.rare.square().sum() if rank == 1 else loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.fixture
def model() -> Stage:
    torch.manual_seed(0)
    return Stage().double()


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(STEPS, RANKS, 4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def shares_of(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], world: World
) -> StageShares:
    step = OptimizerStep(optimizer, comm=world, own_hooks=())
    return StageShares(optimizer, parameters, replicas=world, optimizer_step=step)


@pytest.mark.parametrize("unit_bytes", [1000, 10**6])
def test_shares_update_as_a_whole_optimizer(
    monkeypatch: pytest.MonkeyPatch, model: Stage, inputs: torch.Tensor, unit_bytes: int
) -> None:
    monkeypatch.setattr(stage_shares, "_UNIT_BYTES", unit_bytes)
    models = [copy.deepcopy(model) for _ in range(RANKS)]

    def rank_main(world: World) -> dict[str, Any]:
        mine = models[world.rank]
        optimizer = adamw(mine)
        parameters = list(mine.parameters())
        shares = shares_of(optimizer, parameters, world)
        squares = []
        for number in range(STEPS):
            mine.loss(inputs[number, world.rank], rank=world.rank).backward()
            shares.sum()
            assert all(parameter.grad is None for parameter in parameters)
            square = torch.tensor([shares.square()], dtype=torch.float64)
            world.all_reduce(square)
            squares.append(float(square))
            shares.update(factor=FACTOR)
            shares.drop_gradients()
        moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        shares.release()
        assert all(element_shard(parameter) is None for parameter in parameters)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == list(map(id, parameters))
        return {"squares": squares, "moments": moments, "parameters": mine.state_dict()}

    found = run_threads(RANKS, rank_main, timeout_s=300)
    optimizer, squares = adamw(model), []
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            model.loss(inputs[number, rank], rank=rank).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        squares.append(sum(float(g.square().sum()) for g in gradients))
        for gradient in gradients:
            gradient.mul_(FACTOR)
        optimizer.step()
    moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert sum(rank["moments"] for rank in found) == moments
    assert max(rank["moments"] for rank in found) < 0.5 * moments
    for rank in found:
        assert rank["squares"] == pytest.approx(squares, rel=1e-12)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(rank["parameters"][name], tensor, rtol=1e-12, atol=1e-15, msg=name)


def test_a_gradient_that_is_not_finite_is_seen_in_the_squares(model: Stage, inputs: torch.Tensor) -> None:
    models = [copy.deepcopy(model) for _ in range(RANKS)]

    def rank_main(world: World) -> float:
        mine = models[world.rank]
        shares = shares_of(adamw(mine), list(mine.parameters()), world)
        mine.loss(inputs[0, world.rank], rank=world.rank).backward()
        if world.rank == 2:
            assert mine.up.weight.grad is not None
            mine.up.weight.grad[0, 0] = torch.inf
        shares.sum()
        square = torch.tensor([shares.square()], dtype=torch.float64)
        world.all_reduce(square)
        return float(square)

    assert not any(torch.isfinite(torch.tensor(run_threads(RANKS, rank_main, timeout_s=300))))


def test_what_cannot_be_divided_is_refused(model: Stage) -> None:
    with pytest.raises(UsageError, match="float16"):
        check_stage(adamw(model.half()), list(model.parameters()))
    with pytest.raises(UsageError, match="LBFGS calls a closure"):
        check_stage(torch.optim.LBFGS(model.parameters()), list(model.parameters()))
    with pytest.raises(UsageError, match="Adafactor needs whole layers"):
        check_stage(torch.optim.Adafactor(model.parameters()), list(model.parameters()))
