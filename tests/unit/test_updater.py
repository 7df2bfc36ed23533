"""The updater, with ranks as threads: N ranks equal one rank, whatever the split."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.errors import DivergedError, UsageError
from hpctrain.reduce import AllReduceUpdater, LossScale
from hpctrain.reduce import add as add_module
from hpctrain.reduce import engine as engine_module
from hpctrain.reduce.add import add_in_numpy
from hpctrain.reduce.algorithm import Algorithm
from hpctrain.reduce.buckets import FLAG_GAP, Bucket
from hpctrain.reduce.engine import EngineReducer
from hpctrain.reduce.make import ReducerMaker
from hpctrain.reduce.reducer import Numbers
from hpctrain.topology import Topology
from tests.unit.updater_cases import BATCH, Net, Watched, batch, make, on_threads, reducer_for, share

RANK_COUNTS = [1, 2, 3, 4]


def train(
    world: World,
    *,
    steps: int = 10,
    micro_batches: int = 1,
    nodes: list[str] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, Any]:
    if nodes is not None:
        options["reducer"] = reducer_for(world, nodes=nodes)
    net, updater = make(world, dtype=dtype, **options)
    losses, norms = [], []
    for step in range(steps):
        x, y = (t[share(world)] for t in batch(step, dtype))
        parts = list(zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True))
        total = 0.0
        for number, (px, py) in enumerate(parts, start=1):
            loss = functional.cross_entropy(net(px), py)
            updater.backward(loss, weight=len(py) / BATCH, last=number == len(parts))
            total += float(loss.detach()) * len(py) / BATCH
        outcome = updater.step(sums={"loss": total})
        losses.append(outcome.sums["loss"])
        norms.append(outcome.grad_norm)
    updater.close()
    return {"losses": losses, "norms": norms, "parameters": [p.detach().clone() for p in net.parameters()]}


def closeness(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def plain_torch(steps: int = 10) -> list[float]:
    """The same training with nothing of ours in it."""
    net = Net(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for step in range(steps):
        x, y = batch(step, torch.float64)
        loss = functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


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


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("compiled", [True, False])
def test_reductions_within_step_on_one_node_equal_plain_torch(
    num_ranks: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node whose ranks use all cores, with the norm and the loss carried by the reductions."""
    if not compiled:
        monkeypatch.setattr(add_module, "_add", add_in_numpy)
        monkeypatch.setattr(engine_module, "COMPILED", None)

    def case(world: World, *, overlap: bool) -> dict[str, Any]:
        maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
        reducer = maker.make(Algorithm.HIERARCHICAL, wire="fp32")
        found = train(world, reducer=reducer, overlap=overlap, micro_batches=2, clip_norm=1.0)
        reducer.close()
        return found

    found = on_threads(num_ranks, partial(case, overlap=False))
    beside = on_threads(num_ranks, partial(case, overlap=True))[0]
    assert all(entry["losses"] == found[0]["losses"] for entry in found)
    assert all(entry["norms"] == found[0]["norms"] for entry in found)
    assert found[0]["losses"] == beside["losses"]
    assert found[0]["norms"] == beside["norms"]
    assert all(map(torch.equal, found[0]["parameters"], beside["parameters"]))
    one = on_threads(1, lambda world: train(world, micro_batches=2, clip_norm=1.0))[0]
    assert closeness(found[0]["losses"], one["losses"]) < 1e-12
    assert closeness(found[0]["norms"], one["norms"]) < 1e-12


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_that_come_in_another_order_on_each_rank_are_summed_all_the_same(num_ranks: int) -> None:
    """Within `step` on one node, where others may begin with what is there; some of them are unused."""
    numel = 50_000

    def case(world: World, *, overlap: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        parameters = [torch.nn.Parameter(torch.randn(numel, generator=generator)) for _ in range(6)]
        maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
        reducer = maker.make(Algorithm.HIERARCHICAL, wire="fp32")
        updater = AllReduceUpdater(
            torch.optim.SGD(parameters, lr=0.01), comm=world.duplicate(), reducer=reducer, overlap=overlap
        )
        assert len(updater.buckets) == 1
        order = random.Random(world.rank)
        for step in range(6):
            used = order.sample(range(6), 6 if step % 2 else 4)
            data = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + world.rank))
            loss = sum((parameters[index] * data).square().sum() for index in used)
            assert isinstance(loss, torch.Tensor)
            updater.backward(loss, weight=1.0 / world.num_ranks)
            updater.step()
        updater.close()
        reducer.close()
        return [parameter.detach() for parameter in parameters]

    found = on_threads(num_ranks, partial(case, overlap=False))
    beside = on_threads(num_ranks, partial(case, overlap=True))
    for parameters in found:
        assert all(map(torch.equal, parameters, beside[0]))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_on_one_node_a_loss_scale_changes_no_bit(overlap: bool, clip_norm: float | None) -> None:
    """Sums are unscaled as they are made; also after a step that was skipped, with the next scale."""

    def case(world: World, *, wire: str) -> dict[str, Any]:
        maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
        made = maker.make(Algorithm.HIERARCHICAL, wire=wire)
        assert isinstance(made, EngineReducer)
        reducer: Any = made if overlap else Impatient(made)
        parameters = large([50_000, 7, 5, 3])  # of the last two one is used on one rank, one on none
        updater = AllReduceUpdater(
            torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1),
            comm=world.duplicate(),
            reducer=reducer,
            overlap=overlap,
            clip_norm=clip_norm,
        )
        outcomes = []
        for step in range(5):
            used = [2, 1, 0] if world.rank == 0 else [1, 0]
            loss = squares(parameters, used) * (math.inf if step == 2 and world.rank == 1 else 1.0)
            updater.backward(loss, weight=(world.rank + 1) / 3)
            outcomes.append(updater.step())
        updater.close()
        reducer.close()
        if wire == "fp16" and not overlap:
            assert set(reducer.factors) == {1 / 1024, 1 / 512}
        return {
            "applied": [outcome.applied for outcome in outcomes],
            "norms": [str(outcome.grad_norm) for outcome in outcomes],
            "scales": [outcome.loss_scale for outcome in outcomes],
            "parameters": [parameter.detach() for parameter in parameters],
        }

    scaled = on_threads(2, partial(case, wire="fp16"))
    plain = on_threads(2, partial(case, wire="fp32"))
    for found in scaled:
        assert found["applied"] == [True, True, False, True, True]
        assert found["scales"] == [1024, 1024, 1024, 512, 512]
        assert found["norms"] == plain[0]["norms"]
        assert all(map(torch.equal, found["parameters"], plain[0]["parameters"]))
        changed = [
            not torch.equal(a, b) for a, b in zip(found["parameters"], large([50_000, 7, 5, 3]), strict=True)
        ]
        assert changed == [True, True, True, False]


class Impatient:
    """A reducer whose other ranks sum at once what they are told of: it takes it away, and gives it back to `reduce`.

    What is written into a bucket after it was told of would be lost.
    """

    def __init__(self, reducer: EngineReducer) -> None:
        self._reducer = reducer
        self._buffers: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}
        self.told: list[tuple[int, int]] = []
        self.factors: list[float] = []

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        self._buffers = self._reducer.plan(buckets, device=device)
        return self._buffers

    def filled(self, number: int, num_elems: int) -> None:
        self.told.append((number, num_elems))
        before = self._taken.get(number, torch.empty(0))
        assert before.numel() < num_elems
        buffer = self._buffers[number]
        self._taken[number] = torch.cat([before, buffer[before.numel() : num_elems]])
        buffer[:num_elems] = torch.nan

    def reduce(self, number: int) -> Iterator[bool]:
        taken = self._taken.pop(number)
        buffer = self._buffers[number]
        assert taken.numel() == buffer.numel()
        assert buffer.isnan().all()
        buffer.copy_(taken)
        return self._reducer.reduce(number)

    def keep_squares(self) -> None:
        self._reducer.keep_squares()

    def scale_sums(self, factor: float) -> bool:
        self.factors.append(factor)
        return self._reducer.scale_sums(factor)

    def square(self) -> float | None:
        return self._reducer.square()

    def carry(self, numbers: Numbers) -> bool:
        return self._reducer.carry(numbers)

    def sum_numbers(self, numbers: Numbers) -> Iterator[bool] | None:
        return self._reducer.sum_numbers(numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def large(numels: Sequence[int]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(numel, generator=generator)) for numel in numels]


def squares(parameters: list[torch.nn.Parameter], order: Sequence[int]) -> torch.Tensor:
    """A loss whose gradients become ready in `order`."""
    loss = torch.zeros(())
    for index in reversed(order):
        loss = loss + parameters[index].square().sum()
    return loss


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_told_to_be_there_is_there_and_is_not_written_again(micro_batches: int) -> None:
    numels = [50_000] * 6
    whole = (0, 300_000 + FLAG_GAP + 6)
    orders_and_told = [
        ([5, 4, 3, 2, 1, 0], [(0, 150_000), (0, 250_000), whole]),  # as planned before any was seen
        ([0, 1, 2, 3, 4, 5], [whole]),
        ([5, 4, 3, 0, 1, 2], [(0, 150_000), whole]),
        (
            [4, 5, 3, 2, 1, 0],
            [(0, 150_000), (0, 250_000), whole],
        ),  # in another order, but all that come before
        ([3, 2, 1, 0], [whole]),
        ([5, 4, 3, 2, 1], [(0, 150_000), (0, 250_000), whole]),
        ([], [whole]),
    ]

    def case(world: World) -> list[torch.Tensor]:
        maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
        made = maker.make(Algorithm.HIERARCHICAL, wire="fp32")
        assert isinstance(made, EngineReducer)
        reducer, parameters = Impatient(made), large(numels)
        updater = AllReduceUpdater(
            torch.optim.SGD(parameters, lr=0.1), comm=world.duplicate(), reducer=reducer, overlap=False
        )
        for order, told in orders_and_told:
            for number in range(micro_batches if order else 0):
                assert reducer.told == []
                last = number == micro_batches - 1
                updater.backward(squares(parameters, order), weight=1 / (2 * micro_batches), last=last)
            assert reducer.told == (told if len(order) == 6 else told[:-1])
            updater.step()
            assert reducer.told == told
            reducer.told.clear()
        updater.close()
        reducer.close()
        return [parameter.detach() for parameter in parameters]

    expected = large(numels)
    optimizer = torch.optim.SGD(expected, lr=0.1)
    for order, _ in orders_and_told:
        if order:
            squares(expected, order).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    for parameters in on_threads(2, case):
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-6, atol=0)


def test_no_rank_applies_a_step_that_another_refuses_whose_gradients_are_there() -> None:
    applied = []

    def case(world: World) -> None:
        maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
        reducer = maker.make(Algorithm.HIERARCHICAL, wire="fp32")
        parameters = large([50_000] * 3)
        updater = AllReduceUpdater(
            torch.optim.SGD(parameters, lr=0.1), comm=world.duplicate(), reducer=reducer, overlap=False
        )
        updater.backward(squares(parameters, [2, 1, 0]), weight=0.5)
        if world.rank == 1:
            parameters[0].grad = torch.ones(50_000)
        try:
            updater.step()
        finally:
            same = map(
                torch.equal, (p.detach() for p in parameters), (p.detach() for p in large([50_000] * 3))
            )
            applied.append(not all(same))

    with pytest.raises(UsageError, match="changed between backward and step"):
        on_threads(2, case)
    assert applied == [False, False]


def test_ranks_of_a_node_may_differ_in_whether_they_reduce_beside_backward() -> None:
    def case(world: World) -> dict[str, Any]:
        maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
        reducer = maker.make(Algorithm.HIERARCHICAL, wire="fp32")
        found = train(world, reducer=reducer, overlap=world.rank == 1)
        reducer.close()
        return found

    found = on_threads(3, case)
    assert all(entry["losses"] == found[0]["losses"] for entry in found)
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
    scale = 0.5 / free["norms"][0]
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
        if change == "in place":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        elif change == "another backward":
            with updater.no_sync():
                functional.cross_entropy(net(x), y).backward()
        else:
            net.first.grad = torch.zeros_like(net.first) if change == "another tensor" else None
        try:
            updater.step()
        except UsageError as error:
            return str(error)
        finally:
            updater.close()
        return ""

    assert all("clip_norm=" in text for text in on_threads(num_ranks, case))


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
