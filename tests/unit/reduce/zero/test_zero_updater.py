"""A sharded optimizer trains as a whole one: the same bits on the same ranks, with a share of the state on each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from hpctrain.comm import World, run_threads
from hpctrain.errors import UsageError
from tests.unit.reduce.zero.zero_cases import (
    BATCH,
    LAYOUTS,
    SHARDED,
    Plan,
    make_updater,
    net_of,
    samples,
    take_step,
    train,
)

NUM_ELEMS = sum(parameter.numel() for parameter in net_of(torch.float32).parameters())
ADAM_ELEMS = 2 * NUM_ELEMS


def trained(plan: Plan) -> list[dict[str, object]]:
    return run_threads(len(plan.layout), partial(train, plan=plan), timeout_s=300)


@pytest.mark.parametrize("algorithm", ["direct", "hierarchical"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_as_plain_data_parallel(layout: str, algorithm: str) -> None:
    plan = Plan(shard="none", layout=layout, algorithm=algorithm, micro_batches=2, looks_at=(0, 3))
    plain = trained(plan)
    for shard in SHARDED:
        found = trained(replace(plan, shard=shard))
        for one, other in zip(found, plain, strict=True):
            assert one["losses"] == other["losses"]
            assert all(map(torch.equal, one["parameters"], other["parameters"]))
            assert all(map(torch.equal, one["seen"], other["seen"]))
            assert one["norms"] == pytest.approx(other["norms"], rel=1e-6)
        assert sum(one["state_elems"] for one in found) == ADAM_ELEMS
        most = max(one["state_elems"] for one in found)
        assert most < ADAM_ELEMS / len(layout) + 2 * 5 * 65  # of five buckets


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layout", ["a", "ab", "aba", "abbb"])
def test_float64_equals_one_rank(layout: str, overlap: bool) -> None:
    """Also with clipping, uneven shares and elements that no whole vector holds."""
    plan = Plan(
        shard="none", layout="a", dtype=torch.float64, steps=20, clip_norm=0.1, micro_batches=3, overlap=overlap,
        align_elems=1, rare_at=(),
    )  # fmt: skip
    (alone,) = trained(plan)
    for shard in SHARDED:
        for found in trained(replace(plan, shard=shard, layout=layout)):
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-10)
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-10)
            for one, other in zip(found["parameters"], alone["parameters"], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("wire", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2)])
def test_other_wires_train_about_the_same(wire: str, tolerance: float) -> None:
    def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    plan = Plan(shard="gradients", layout="aabb", make_optimizer=sgd, steps=10)
    exact = trained(plan)
    found = trained(replace(plan, wire=wire))
    for one, other in zip(found, exact, strict=True):
        assert one["losses"] == found[0]["losses"]
        assert one["losses"] == pytest.approx(other["losses"], rel=tolerance)
        assert all(map(torch.equal, one["parameters"], found[0]["parameters"]))


@pytest.mark.parametrize("shard", SHARDED)
@pytest.mark.parametrize(
    ("layout", "wire", "bytes_a_gradient"),
    [("ab", "fp32", 4), ("abcd", "fp32", 4), ("aabb", "fp32", 4), ("abcd", "fp16", 2), ("aabb", "int8", 1)],
)
def test_a_node_sends_each_gradient_and_parameter_once_to_other_nodes(
    shard: str, layout: str, wire: str, bytes_a_gradient: float
) -> None:
    plan = Plan(shard=shard, layout=layout, wire=wire, algorithm="hierarchical", steps=4, bucket_bytes=12_000)
    nodes = len(set(layout))
    sent = sum(found["sent"] for found in trained(plan)) / plan.steps
    # (C-1)/C of the gradients and of the parameters leave each node, and come from C nodes.
    expected = (nodes - 1) * NUM_ELEMS * (bytes_a_gradient + 4)
    assert sent == pytest.approx(expected, rel=0.02 if wire == "int8" else 1e-9)


def adagrad(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Makes its state at once."""
    return torch.optim.Adagrad(parameters, lr=0.05)


class Keeping(torch.optim.SGD):
    """Adds the gradient of the step before, which it keeps as it was given."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                before = self.state[parameter].get("before")
                self.state[parameter]["before"] = parameter.grad
                with torch.no_grad():
                    parameter.sub_(0.05 * parameter.grad)
                    if before is not None:
                        parameter.sub_(0.02 * before)


@pytest.mark.parametrize("make_optimizer", [adagrad, partial(Keeping, lr=0.1)])
def test_optimizers_that_make_state_at_once_or_keep_gradients(make_optimizer: object) -> None:
    plan = Plan(shard="none", layout="aba", make_optimizer=make_optimizer)  # type: ignore[arg-type]
    plain = trained(plan)
    for shard in SHARDED:
        for one, other in zip(trained(replace(plan, shard=shard)), plain, strict=True):
            assert all(map(torch.equal, one["parameters"], other["parameters"]))


@pytest.mark.parametrize("shard", SHARDED)
def test_parameters_of_half_precision(shard: str) -> None:
    plan = Plan(shard="none", layout="ab", dtype=torch.bfloat16, rare_at=())
    for one, other in zip(trained(replace(plan, shard=shard)), trained(plan), strict=True):
        assert all(map(torch.equal, one["parameters"], other["parameters"]))


def test_buckets_are_reduced_in_the_order_in_which_they_were_complete() -> None:
    """The layer that is registered last is used first here."""

    class Swapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = torch.nn.Linear(40, 3), torch.nn.Linear(7, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(self.first(x))
            return found

    def case(world: World) -> list[list[int]]:
        model = Swapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan(shard="gradients", layout="ab", bucket_bytes=1)
        updater, reducer = make_updater(world, plan, optimizer)
        orders = []
        for _ in range(2):
            orders.append([bucket.slots[0].parameter for bucket in updater.buckets])
            updater.backward(model(torch.ones(2, 7)).sum(), weight=0.5)
            updater.step()
        updater.close()
        reducer.close()
        return orders

    for orders in run_threads(2, case, timeout_s=300):
        assert orders[0] == [3, 2, 1, 0]
        assert set(orders[1][:2]) == {0, 1}


def test_what_cannot_be_sharded_is_refused_in_words() -> None:
    class Lamb(torch.optim.SGD): ...

    def refused(
        world: World, match: str, parameter: torch.Tensor, kind: type = torch.optim.SGD, wire: str = "fp32"
    ) -> None:
        with pytest.raises(UsageError, match=match):
            make_updater(
                world, Plan(shard="optimizer", layout="ab", wire=wire),
                kind([torch.nn.Parameter(parameter)], lr=0.1),
            )  # fmt: skip

    def case(world: World) -> None:
        refused(world, "is complex", torch.ones(3, dtype=torch.complex64))
        refused(world, "has gaps", torch.ones(4, 4)[:, ::2])
        refused(world, "whole layers", torch.ones(3), kind=Lamb)
        refused(world, "each value to its owner", torch.ones(3), wire="top-k")

    run_threads(2, case, timeout_s=300)


@pytest.mark.parametrize("shard", SHARDED)
def test_a_plain_backward_after_dropped_gradients_has_its_own_weight(shard: str) -> None:
    def case(world: World) -> list[float]:
        norms = []
        for drops in (True, False):
            net = net_of(torch.float32)
            plan = Plan(shard=shard, layout="ab")
            updater, reducer = make_updater(world, plan, torch.optim.SGD(net.parameters(), lr=0.1))
            if drops:
                updater.backward(net(samples(0, plan.dtype)).sum(), weight=0.5, last=False)
                updater.zero_grad()
            net(samples(0, plan.dtype)).sum().backward()
            norms.append(updater.step().grad_norm)
            updater.close()
            reducer.close()
        return norms

    for dropped, plain in run_threads(2, case, timeout_s=300):
        assert dropped == plain


@pytest.mark.parametrize("shard", SHARDED)
@pytest.mark.parametrize("how", ["updater", "model"])
def test_gradients_that_no_step_takes_are_dropped_on_all_ranks(how: str, shard: str) -> None:
    """As those that a generator's backward leaves in a discriminator."""

    def case(world: World, drops: bool) -> list[torch.Tensor]:
        net = net_of(torch.float64)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        plan = Plan(shard=shard, layout="abb", dtype=torch.float64)
        updater, reducer = make_updater(world, plan, optimizer)
        for step in range(3):
            if drops:
                net(torch.full((2, 3, 4, 4), 5.0 + step, dtype=torch.float64)).square().sum().backward()
                (updater if how == "updater" else net).zero_grad()
            take_step(world, net, updater, plan, step)
        updater.close()
        reducer.close()
        return [parameter.detach().clone() for parameter in net.parameters()]

    for one, other in zip(
        run_threads(3, partial(case, drops=True), timeout_s=300),
        run_threads(3, partial(case, drops=False), timeout_s=300),
        strict=True,
    ):
        assert all(map(torch.equal, one, other))


def test_misuse_is_refused_and_close_gives_the_parameters_back() -> None:
    def case(world: World) -> None:
        net = net_of(torch.float32)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plan = Plan(shard="gradients", layout="ab")
        updater, reducer = make_updater(world, plan, optimizer)
        net(torch.ones(1, 3, 4, 4), with_rare=True).sum().backward()
        with pytest.raises(UsageError, match="clip_norm="):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with pytest.raises(UsageError, match="part"):
            updater.synchronize()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(UsageError, match="LossScale"):
            scaler.step(updater)  # type: ignore[arg-type]
        pending = net.scale.grad
        net.scale.grad = torch.tensor(1.0)
        with pytest.raises(UsageError, match="changed between backward and step"):
            updater.step()
        net.scale.grad = pending
        with pytest.raises(UsageError, match="backward ran twice"):
            net(torch.ones(1, 3, 4, 4), with_rare=True).sum().backward()
        updater.zero_grad()
        updater.step()
        moved = net.rare.data
        net.rare.data = moved.clone()
        with pytest.raises(UsageError, match="other memory"):
            updater.step()
        net.rare.data = moved
        take_step(world, net, updater, plan, 0)
        updater.close()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True))
        assert not optimizer.state
        with pytest.raises(UsageError, match="closed"):
            updater.step()
        reducer.close()

    run_threads(2, case, timeout_s=300)


def test_few_slots_hold_gradients_of_any_size() -> None:
    """Also where the order of the gradients is not that of the plan, and with one thread for all."""
    for overlap in (True, False):
        plan = Plan(shard="gradients", layout="abc", bucket_bytes=64, overlap=overlap, steps=3)
        plain = trained(replace(plan, shard="none"))
        for one, other in zip(trained(plan), plain, strict=True):
            assert all(map(torch.equal, one["parameters"], other["parameters"]))
    assert BATCH % 3  # ranks have unequal shares
