"""Clipping gives what `torch.nn.utils.clip_grad_norm_` gives, also near norms of 1e-6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.step_end import check_clip_norm, clip_factor
from tests.unit.reduce.zero.zero_cases import Plan, make_updater

GRADIENT = torch.tensor([3e-6, -4e-6, 0.0, 1e-6], dtype=torch.float64)


@pytest.mark.parametrize("size", [1e-9, 1e-6, 0.5, 1.0, 1.0 + 5e-7, 3.0, 1e12])
@pytest.mark.parametrize("clip_norm", [1e-6, 1.0])
def test_the_factor_is_torchs(size: float, clip_norm: float) -> None:
    parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.full((1,), size, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], clip_norm)
    assert size * clip_factor(size, clip_norm=clip_norm) == pytest.approx(float(parameter.grad), rel=1e-15)
    assert clip_factor(size, clip_norm=None) == 1.0


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_a_norm_to_clip_to_is_above_zero(wrong: float) -> None:
    with pytest.raises(UsageError, match="give a number above 0"):
        check_clip_norm(wrong)


def stepped(make: Callable[[torch.optim.Optimizer], Any], *, weight: float) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    updater = make(torch.optim.SGD([parameter], lr=1.0))
    updater.backward((parameter * GRADIENT).sum(), weight=weight)
    updater.step()
    updater.close()
    return parameter.detach().clone()


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_updaters_clip_as_torch_does(shard: str) -> None:
    expected = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    expected.grad = GRADIENT.clone()
    torch.nn.utils.clip_grad_norm_([expected], 2e-6)

    def case(world: World) -> torch.Tensor:
        plan = Plan(
            shard=shard, layout="a" * world.num_ranks, dtype=torch.float64, clip_norm=2e-6, align_elems=1
        )
        return stepped(lambda optimizer: make_updater(world, plan, optimizer)[0], weight=1 / world.num_ranks)

    for num_ranks in (1, 2):
        for found in run_threads(num_ranks, case):
            assert torch.allclose(found, -expected.grad, rtol=1e-12, atol=0.0)
