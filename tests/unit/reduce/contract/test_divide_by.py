"""Gradients divided by the ranks' sum of weights: own loops whose losses are means over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import UsageError
from hpctrain.reduce import AllReduceUpdater, BucketReducer, LowRankReducer, TopKReducer
from tests.unit.reduce.zero.zero_cases import Plan, make_updater

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


# ------------------------------------------------------------------ wire formats with error feedback


@pytest.mark.parametrize(
    ("shard", "wire"),
    [
        ("none", "int8"),
        ("none", "top-k"),
        ("none", "low-rank"),
        ("optimizer", "int8"),
        ("gradients", "int8"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_error_feedback_is_refused(num_ranks: int, shard: str, wire: str) -> None:
    def case(world: World) -> None:
        algorithm = "flat" if wire in ("top-k", "low-rank") else "hierarchical"
        plan = Plan(shard=shard, layout="abc"[:num_ranks], wire=wire, algorithm=algorithm)
        parameter = torch.nn.Parameter(torch.ones(4, 4))
        updater, _ = make_updater(world, plan, torch.optim.SGD([parameter], lr=1.0))
        updater.backward(parameter.sum(), weight=5.0)
        with pytest.raises(UsageError, match=rf"wire='{wire}'.*backward\(loss, weight=weight / total\)"):
            updater.step(sums={"tokens": 5.0}, divide_by="tokens")
        updater.step()  # nothing was lost, and the ranks agree
        updater.close()

    run_threads(num_ranks, case, timeout_s=300)


SIZE = (24, 20)
STEPS = 30


def tokens_of(step: int, rank: int) -> float:
    """From none to a thousand tokens, and on some ranks none."""
    random = torch.Generator().manual_seed(100 * step + rank)
    power = int(torch.randint(-1, 11, (), generator=random))
    return 0.0 if power < 0 else 2.0**power


def gradient_of(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(7000 + 100 * step + rank)
    return torch.randn(SIZE, generator=random, dtype=torch.float64)


def make_reducer(world: World, wire: str) -> tuple[BucketReducer, Any]:
    if wire == "top-k":
        return TopKReducer(world.duplicate(), fraction=0.05, start_step=0), None
    if wire == "low-rank":
        return LowRankReducer(world.duplicate(), rank=2, start_step=0), None
    plan = Plan(shard="none", layout="abc"[: world.num_ranks], wire=wire, algorithm="direct")
    return make_updater(world, plan, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))[::-1]


@pytest.mark.parametrize("wire", ["int8", "top-k", "low-rank"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weights_that_are_divided_before_backward_lose_nothing(num_ranks: int, wire: str) -> None:
    """Steps of 1 token and of 3,000: what was applied, and what is still to be sent, are the means over all tokens."""
    totals = [sum(tokens_of(step, rank) for rank in range(num_ranks)) for step in range(STEPS)]
    assert max(totals) > 100 * min(total for total in totals if total)

    def case(world: World) -> dict[str, torch.Tensor]:
        parameter = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        reducer, _ = make_reducer(world, wire)
        updater = AllReduceUpdater(torch.optim.SGD([parameter], lr=1.0), comm=world, reducer=reducer)
        for step in range(STEPS):
            mine = torch.tensor([tokens_of(step, world.rank)], dtype=torch.float64)
            world.all_reduce(total := mine.clone())
            if total > 0:
                loss = (parameter * gradient_of(step, world.rank)).sum()
                updater.backward(loss, weight=float(mine / total))
            updater.step()
        updater.close()
        left = torch.zeros(parameter.numel(), dtype=torch.float64)
        for held in updater.state_tensors():
            if held.name in ("residual", "lost"):
                first = held.offset[1]
                left[first : first + held.tensor.shape[1]] += held.tensor[0]
        world.all_reduce(left)
        reducer.close()
        return {"applied": -parameter.detach(), "left": left.view(SIZE)}

    exact = sum(
        tokens_of(step, rank) / total * gradient_of(step, rank)
        for step, total in enumerate(totals)
        for rank in range(num_ranks)
        if total
    )
    for found in run_threads(num_ranks, case, timeout_s=300):
        assert found["left"].abs().max() > 1e-3
        torch.testing.assert_close(found["applied"] + found["left"], exact, rtol=0, atol=1e-10)
