"""Gradients divided by the ranks' sum of weights: own loops whose losses are means over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import UsageError
from tests.unit.reduce.sharded.scatter_cases import Plan, make_updater

TOKENS = (5.0, 2.0, 0.0)


def stepped(world: World, *, shard: str, sums: dict[str, float], weight: float) -> dict[str, Any]:
    plan = Plan(shard=shard, layout="a" * world.num_ranks, dtype=torch.float64, clip_norm=0.5, align_elems=1)
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    updater, _ = make_updater(world, plan, torch.optim.SGD([parameter], lr=1.0))
    updater.backward((parameter * torch.arange(4.0) * (1 + world.rank)).sum(), weight=weight)
    scale = updater.loss_scale
    outcome = updater.step(sums=sums, divide_by="tokens")
    same_scale = updater.loss_scale == scale
    updater.close()
    return {"parameter": parameter.detach().clone(), "outcome": outcome, "same scale": same_scale}


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_the_mean_is_over_all_tokens(shard: str) -> None:
    mean = (
        sum(tokens * (1 + rank) for rank, tokens in enumerate(TOKENS))
        / sum(TOKENS)
        * torch.arange(4.0).double()
    )
    expected = torch.ones(4, dtype=torch.float64) - mean * 0.5 / (mean.norm() + 1e-6)

    def case(world: World) -> dict[str, Any]:
        tokens = TOKENS[world.rank]
        return stepped(world, shard=shard, sums={"a": 1.0, "tokens": tokens}, weight=tokens)

    for found in run_threads(3, case):
        torch.testing.assert_close(found["parameter"], expected, rtol=1e-12, atol=1e-12)
        assert found["outcome"].grad_norm == pytest.approx(float(mean.norm()), rel=1e-12)
        assert found["outcome"].sums == {"a": 3.0, "tokens": 7.0}


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_of_nothing_there_is_no_step_and_no_other_loss_scale(shard: str) -> None:
    for found in run_threads(2, lambda world: stepped(world, shard=shard, sums={"tokens": 0.0}, weight=0.0)):
        assert torch.equal(found["parameter"], torch.ones(4, dtype=torch.float64))
        assert not found["outcome"].applied
        assert math.isnan(found["outcome"].grad_norm)
        assert found["same scale"]


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        ({"tokens": -1.0}, "-2: weights are finite numbers, 0 or more"),
        ({"tokens": math.inf}, "inf: weights are finite"),
        ({"tokens": math.nan}, "nan: weights are finite"),
        ({"token": 1.0}, "needs a number of that name in sums"),
    ],
)
def test_wrong_sums_are_refused(sums: dict[str, float], words: str) -> None:
    def case(world: World) -> None:
        with pytest.raises(UsageError, match=words):
            stepped(world, shard="none", sums=sums, weight=1.0)

    run_threads(2, case)


def test_a_plain_backward_is_refused() -> None:
    def case(world: World) -> None:
        parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        plan = Plan(shard="none", layout="a" * world.num_ranks, dtype=torch.float64)
        updater, _ = make_updater(world, plan, torch.optim.SGD([parameter], lr=1.0))
        parameter.sum().backward()
        with pytest.raises(UsageError, match=r"after a plain loss\.backward"):
            updater.step(sums={"tokens": 1.0}, divide_by="tokens")
        updater.close()

    run_threads(2, case)
