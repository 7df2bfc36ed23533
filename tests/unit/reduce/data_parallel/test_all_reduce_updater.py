"""The updater, with ranks as threads: N ranks equal one rank, whatever the split."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import pytest
import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.errors import DivergedError, UsageError
from hpctrain.reduce import AllReduceUpdater, LossScale
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.topology import Topology
from tests.sessions import session_over
from tests.unit.reduce.data_parallel.updater_cases import (
    Net,
    Watched,
    batch,
    closeness,
    make,
    on_threads,
    plain_torch,
    reducer_for,
    share,
    train,
)

RANK_COUNTS = [1, 2, 3, 4]


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_equals_plain_torch_on_one_rank(num_ranks: int, micro_batches: int) -> None:
    found = on_threads(num_ranks, lambda world: train(world, micro_batches=micro_batches))
    assert all(entry["losses"] == found[0]["losses"] for entry in found)
    assert closeness(found[0]["losses"], plain_torch()) < 1e-12


@pytest.mark.parametrize("nodes", [["a", "a", "b", "b"], ["a", "a", "a", "b"], ["a", "b", "b"], ["a", "b"]])
def test_two_levels_equal_flat(nodes: list[str]) -> None:
    flat = on_threads(len(nodes), lambda world: train(world))[0]
    found = on_threads(len(nodes), lambda world: train(world, nodes=nodes))
    assert closeness(found[0]["losses"], flat["losses"]) < 1e-12
    for entry in found[1:]:
        assert all(map(torch.equal, entry["parameters"], found[0]["parameters"]))


@pytest.mark.parametrize("algorithm", ["ring", "direct", "hierarchical", "hierarchical-ring"])
@pytest.mark.parametrize("nodes", [["a", "a", "b", "b"], ["a", "a", "b"], ["a", "a"]])
def test_reductions_under_way_at_the_same_time_equal_plain_torch(algorithm: str, nodes: list[str]) -> None:
    def case(world: World) -> dict[str, Any]:
        maker = ReducerMaker(world, topology=Topology.from_node_names(nodes))
        reducer = Watched(maker.make(Algorithm(algorithm), wire="fp32"))
        found = train(world, reducer=reducer, max_in_flight=3)
        assert len(reducer.plans) == 2  # guessed, and in the order of readiness
        reducer.close()
        return found

    found = on_threads(len(nodes), case)
    assert all(map(torch.equal, found[0]["parameters"], found[-1]["parameters"]))
    assert closeness(found[0]["losses"], plain_torch()) < 1e-12


def test_numbers_beside_the_gradients_may_be_tensors() -> None:
    net, updater = on_threads(1, make)[0]
    x, y = batch(0, torch.float64)
    loss = functional.cross_entropy(net(x), y)
    updater.backward(loss, weight=1.0)
    outcome = updater.step(sums={"loss": loss.detach(), "row": torch.ones(1)})  # type: ignore[dict-item]
    assert outcome.sums == {"loss": float(loss.detach()), "row": 1.0}
    updater.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_fp16_on_the_wire_stays_close_and_the_same_on_all_ranks(num_ranks: int) -> None:
    exact = plain_torch()
    found = on_threads(
        num_ranks,
        lambda world: train(world, wire="fp16", loss_scale=LossScale(value=1024.0, dynamic=True)),
    )
    assert 0 < closeness(found[0]["losses"], exact) < 1e-2
    assert all(map(torch.equal, found[0]["parameters"], found[-1]["parameters"]))


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_clipping_is_by_the_norm_over_all_ranks(num_ranks: int) -> None:
    free = on_threads(1, lambda world: train(world, steps=1))[0]
    clipped = on_threads(num_ranks, lambda world: train(world, steps=1, clip_norm=0.5))[0]
    assert clipped["norms"][0] == pytest.approx(free["norms"][0], rel=1e-12)
    before = list(Net(torch.float64).parameters())
    scale = 0.5 / (free["norms"][0] + 1e-6)  # as torch's clip_grad_norm_
    for start, after_free, after_clipped in zip(
        before, free["parameters"], clipped["parameters"], strict=True
    ):
        decay = 0.1 * 0.01 * start  # weight decay is not clipped
        if torch.equal(after_free, start):
            continue
        expected = start - decay - scale * (start - decay - after_free)
        assert torch.allclose(after_clipped, expected, rtol=1e-12)


def test_a_parameter_that_no_rank_used_is_left_alone_and_one_that_some_used_is_averaged() -> None:
    def case(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        net, updater = make(world, momentum=0.0)
        x, y = (t[share(world)] for t in batch(0, torch.float64))
        updater.backward(functional.cross_entropy(net(x), y), weight=1 / world.num_ranks)
        updater.step()
        unused = net.rare.detach().clone()
        updater.backward(
            functional.cross_entropy(net(x, with_rare=world.rank == 1), y), weight=1 / world.num_ranks
        )
        updater.step()
        updater.close()
        return unused, net.rare.detach().clone()

    found = on_threads(3, case)
    start = Net(torch.float64).rare
    assert all(torch.equal(unused, start) for unused, _ in found)  # not even decayed, as on one rank
    assert not torch.equal(found[0][1], start)
    assert all(torch.equal(used, found[0][1]) for _, used in found)


def test_a_rank_without_samples_takes_part() -> None:
    def case(world: World) -> list[torch.Tensor]:
        net, updater = make(world)
        x, y = batch(0, torch.float64)
        if world.rank == 0:
            updater.backward(functional.cross_entropy(net(x), y), weight=1.0)
        updater.step()
        updater.close()
        return [p.detach().clone() for p in net.parameters()]

    alone = on_threads(1, case)[0]
    for parameters in on_threads(3, case):
        assert all(map(torch.equal, parameters, alone))


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale() -> None:
    def case(world: World) -> tuple[list[bool], list[float], bool]:
        scale = LossScale(value=1024.0, dynamic=True)
        net, updater = make(world, dtype=torch.float32, wire="fp16", loss_scale=scale)
        before = [p.detach().clone() for p in net.parameters()]
        applied, scales = [], []
        for step in range(2):
            x, y = (t[share(world)] for t in batch(step, torch.float32))
            huge = 1e6 if step == 0 and world.rank == 1 else 1.0
            updater.backward(functional.cross_entropy(net(x), y) * huge, weight=1 / world.num_ranks)
            outcome = updater.step()
            applied.append(outcome.applied)
            scales.append(updater.loss_scale.value)
            if step == 0:
                untouched = all(map(torch.equal, before, net.parameters()))
                assert math.isnan(outcome.grad_norm)
        updater.close()
        return applied, scales, untouched

    assert on_threads(3, case) == [([False, True], [512.0, 512.0], True)] * 3


def test_gradients_that_stay_not_finite_end_the_run_on_all_ranks() -> None:
    def case(world: World) -> str:
        net, updater = make(world, loss_scale=LossScale(max_skipped_in_row=3))
        x, y = (t[share(world)] for t in batch(0, torch.float64))
        try:
            for _ in range(10):
                updater.backward(functional.cross_entropy(net(x), y) * math.nan, weight=0.5)
                updater.step()
        except DivergedError as error:
            return str(error)
        finally:
            updater.close()
        return "no error"

    found = on_threads(2, case)
    assert found[0].startswith("4 steps in a row")
    assert found[0] == found[1]


@pytest.mark.parametrize("magnitude", [1e-8, 3e-7, 1e-3, 2e5])
def test_fp16_on_the_wire_carries_gradients_that_float16_cannot_hold(magnitude: float) -> None:
    def case(world: World) -> float:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer_for(world, wire="fp16"))
        for _ in range(15):  # overflows halve the scale until it fits
            updater.backward((weight * magnitude).sum(), weight=1 / world.num_ranks)
            if updater.step().applied:
                break
        updater.close()
        return float(-weight.detach()[0])

    for found in on_threads(2, case):
        # 1e-8 times the scale is among float16's subnormal numbers, which have fewer bits
        assert found == pytest.approx(magnitude, rel=2e-2 if magnitude < 1e-7 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])  # views of the buckets, and not
@pytest.mark.parametrize("change", ["in place", "another tensor", "none", "another backward"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_changed_after_backward_are_refused(
    num_ranks: int, change: str, dtype: torch.dtype
) -> None:
    def case(world: World) -> str:
        net, updater = make(world, dtype=dtype)
        x, y = batch(0, dtype)
        functional.cross_entropy(net(x), y).backward()
        try:
            if change == "in place":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            elif change == "another backward":
                with updater.no_sync():
                    functional.cross_entropy(net(x), y).backward()
            else:
                net.first.grad = torch.zeros_like(net.first) if change == "another tensor" else None
                updater.step()
        except UsageError as error:
            return str(error)
        finally:
            updater.close()
        return ""

    wanted = "no_sync" if change == "another backward" else "clip_norm="
    assert all(wanted in text for text in on_threads(num_ranks, case))


@pytest.mark.parametrize("change", ["freeze", "add"])
def test_parameters_that_the_buckets_do_not_know_are_refused(change: str) -> None:
    def case(world: World) -> None:
        net, updater = make(world)
        if change == "freeze":
            net.first.requires_grad_(False)
        else:
            updater._optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        try:
            updater.step()
        finally:
            updater.close()

    with pytest.raises(UsageError, match="drift apart"):
        on_threads(1, case)


def test_plain_backward_averages_over_the_ranks_as_horovod_does() -> None:
    def case(world: World) -> list[torch.Tensor]:
        net, updater = make(world)
        for step in range(3):
            x, y = (t[share(world)] for t in batch(step, torch.float64))
            updater.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            updater.step()
        updater.close()
        return [p.detach().clone() for p in net.parameters()]

    alone = on_threads(1, case)[0]
    for parameters in on_threads(4, case):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(parameters, alone, strict=True))


def test_a_plain_backward_after_dropped_gradients_has_its_own_weight() -> None:
    def case(world: World) -> list[float]:
        norms = []
        for drops in (True, False):
            net, updater = make(world)
            x, y = (t[share(world)] for t in batch(0, torch.float64))
            if drops:
                updater.backward(functional.cross_entropy(net(x), y), weight=0.5, last=False)
                updater.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            norms.append(updater.step().grad_norm)
            updater.close()
        return norms

    for dropped, plain in on_threads(2, case):
        assert dropped == plain


def test_a_second_backward_without_no_sync_is_refused() -> None:
    def case(world: World) -> None:
        net, updater = make(world)
        x, y = batch(0, torch.float64)
        try:
            for _ in range(2):
                functional.cross_entropy(net(x), y).backward()
        finally:
            updater.close()

    with pytest.raises(UsageError, match="no_sync"):
        on_threads(1, case)


@pytest.mark.parametrize("algorithm", ["flat", "direct", "hierarchical"])
def test_the_last_layers_gradients_are_under_way_while_the_first_layers_are_computed(algorithm: str) -> None:
    """Backward stops before the first layer's gradient until the last layer's is being reduced."""

    def case(world: World) -> bool:
        topology = Topology.from_node_names(["a"] * world.num_ranks)
        reducer = Watched(ReducerMaker(world, topology=topology).make(Algorithm(algorithm), wire="fp32"))
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer, bucket_bytes=100, overlap=True)
        found = []

        def before_the_first(gradient: torch.Tensor) -> None:
            until = time.monotonic() + 300
            while not reducer.reduced and time.monotonic() < until:
                time.sleep(0.001)
            found.append(bool(reducer.reduced))

        net[0].weight.register_hook(before_the_first)
        updater.backward(net(torch.ones(2, 8)).square().sum(), weight=1 / world.num_ranks)
        updater.step()
        updater.close()
        reducer.close()
        return found == [True]

    assert all(on_threads(2, case))


def test_accumulation_sends_nothing_before_the_last_micro_batch() -> None:
    def case(world: World) -> list[int]:
        reducer = Watched(reducer_for(world))
        net, updater = make(world, reducer=reducer)
        counts = []
        for last in (False, False, True):
            x, y = batch(0, torch.float64)
            updater.backward(functional.cross_entropy(net(x), y), weight=0.1, last=last)
            if not last:
                counts.append(len(reducer.reduced))
        updater.step()
        counts.append(len(reducer.reduced))
        updater.close()
        return [*counts, len(reducer.plans[0])]

    for before_first, before_second, after, buckets in on_threads(2, case):
        assert (before_first, before_second, after) == (0, 0, buckets)


def test_state_goes_through_json_and_back() -> None:
    def case(world: World) -> dict[str, Any]:
        _, updater = make(world, wire="fp16", loss_scale=LossScale(value=64.0, dynamic=True))
        updater._scale = updater.loss_scale.after_overflow().after_good_step()
        saved = updater.state()
        _, again = make(world, wire="fp16")
        again.load_state(saved)
        updater.close()
        again.close()
        return {"saved": saved, "again": again.state()}

    found = on_threads(1, case)[0]
    for key in ("value", "good_steps", "skipped_total"):
        assert found["saved"]["loss_scale"][key] == found["again"]["loss_scale"][key]


def test_sparse_gradients_are_reduced_as_dense_ones() -> None:
    def case(world: World) -> torch.Tensor:
        table = torch.nn.Embedding(10, 3, sparse=True)
        torch.nn.init.ones_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer_for(world))
        rows = torch.tensor([world.rank, 5])
        updater.backward(table(rows).sum(), weight=1.0)
        updater.step()
        updater.close()
        return table.weight.detach()

    for weight in on_threads(2, case):
        assert weight[:, 0].tolist() == [0.0, 0.0, 1, 1, 1, -1.0, 1, 1, 1, 1]


def test_one_optimizer_has_dense_and_sparse_gradients() -> None:
    rows = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(0))

    def case(world: World) -> list[torch.Tensor]:
        net = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 2)).double()
        generator = torch.Generator().manual_seed(1)
        for parameter in net.parameters():
            torch.nn.init.uniform_(parameter, generator=generator)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        updater = AllReduceUpdater(optimizer, comm=world, reducer=reducer_for(world))
        for _ in range(3):
            net(rows.chunk(world.num_ranks)[world.rank]).square().mean().backward()
            updater.step()
        updater.close()
        return [p.detach() for p in net.parameters()]

    alone = on_threads(1, case)[0]
    for num_ranks in (2, 3):
        for found in on_threads(num_ranks, case):
            for one, other in zip(found, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_closed_updater_makes_no_steps() -> None:
    """It would train each rank on its own gradients."""

    def rank_main(world: World) -> None:
        net, updater = make(world)
        assert updater.close()
        x, target = batch(0, torch.float64)
        functional.cross_entropy(net(x), target).backward()
        with pytest.raises(UsageError, match="closed"):
            updater.step()

    on_threads(2, rank_main)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_that_the_script_replaces_after_synchronize_are_clipped(
    num_ranks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    models = [copy.deepcopy(model) for model in [torch.nn.Linear(4, 3).to(dtype)] * num_ranks]

    def rank_main(world: World) -> tuple[float, float]:
        model = models[world.rank]
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        updater = session_over(world).distributed_optimizer(model, optimizer, clip_norm=0.25)
        loss = model(torch.ones(2, 4, dtype=dtype)).square().sum()
        updater.backward(loss, weight=1.0 / world.num_ranks)
        updater.synchronize()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = 10 * parameter.grad
        norm = updater.step().grad_norm
        moved = [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
        return norm, float(torch.stack([change.double().norm() for change in moved]).norm())

    for norm, moved in on_threads(num_ranks, rank_main):
        assert norm > 2.5
        assert moved == pytest.approx(0.25, rel=1e-5 if dtype is torch.float32 else 0.02)
