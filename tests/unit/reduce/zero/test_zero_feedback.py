"""Error feedback of a sharded optimizer: no error is lost, over steps, and over checkpoints of other layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hpctrain.comm import World, run_threads
from tests.unit.reduce.zero.zero_cases import Plan, make_updater, net_of, take_step

NUM_ELEMS = 700


@pytest.mark.parametrize("layout", ["ab", "abc", "aabb", "abbb"])
def test_what_a_step_rounds_off_comes_with_a_later_one(layout: str) -> None:
    steps = 50
    gradients = torch.randn(len(layout), NUM_ELEMS, generator=torch.Generator().manual_seed(1))

    def case(world: World) -> torch.Tensor:
        weights = torch.nn.Parameter(torch.zeros(NUM_ELEMS))
        optimizer = torch.optim.SGD([weights], lr=1.0)
        plan = Plan(shard="gradients", layout=layout, wire="int8", bucket_bytes=1000)
        updater, reducer = make_updater(world, plan, optimizer)
        for _ in range(steps):
            updater.backward((weights * gradients[world.rank]).sum(), weight=1.0)
            updater.step()
        updater.close()
        reducer.close()
        return weights.detach().clone()

    exact = -steps * gradients.sum(0)
    # The largest rounding of a step: sums of nodes, from all other nodes. Without feedback it would come 50 times.
    rounding = len(layout) * gradients.abs().max() * 2 / 254
    for found in run_threads(len(layout), case, timeout_s=300):
        assert (found - exact).abs().max() < 2 * rounding
        assert (found - exact).abs().max() > 0


def errors_of(found: list[dict[str, Any]]) -> torch.Tensor:
    """The ranks' errors as a checkpoint holds them."""
    (shape,) = {held.global_shape for of_rank in found for held in of_rank["held"]}
    whole = torch.full(shape, torch.nan)
    for held in (held for of_rank in found for held in of_rank["held"]):
        assert held.name == "lost"
        row, place = held.offset
        part = whole[row, place : place + held.tensor.numel()]
        assert part.isnan().all()
        part.copy_(held.tensor[0])
    assert not whole.isnan().any()
    return whole


def case(
    world: World, *, plan: Plan, steps: int, saved: tuple[dict[str, Any], torch.Tensor] | None = None
) -> dict[str, Any]:
    net = net_of(plan.dtype)
    updater, reducer = make_updater(world, plan, torch.optim.SGD(net.parameters(), lr=0.01))
    if saved is not None:
        updater.load_state(saved[0], {"lost": saved[1]})
    for step in range(steps):
        take_step(world, net, updater, plan, step)
    held, state = updater.state_tensors(), updater.state()
    updater.close()
    found = {"held": held, "state": {**state, "order": None}}
    reducer.close()
    return found


@pytest.mark.parametrize("later", ["ab", "abc", "aabb"])
@pytest.mark.parametrize("first", ["ab", "abc", "aabb", "abbb"])
@pytest.mark.parametrize(
    ("saves", "loads"), [("none", "gradients"), ("optimizer", "none"), ("gradients", "optimizer")]
)
def test_errors_go_on_in_another_layout(first: str, later: str, saves: str, loads: str) -> None:
    plan = Plan(shard=saves, layout=first, wire="int8")
    found = run_threads(len(first), partial(case, plan=plan, steps=3), timeout_s=300)
    errors = errors_of(found)
    assert errors.abs().max() > 0
    plan = Plan(shard=loads, layout=later, wire="int8")
    saved = found[0]["state"], errors
    loaded = errors_of(run_threads(len(later), partial(case, plan=plan, steps=0, saved=saved), timeout_s=300))
    torch.testing.assert_close(loaded.sum(0), errors.sum(0), rtol=1e-5, atol=1e-9)
