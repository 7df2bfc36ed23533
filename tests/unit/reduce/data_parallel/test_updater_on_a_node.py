"""The updater where one node's ranks reduce in `step`: what they tell each other before it, and the sums' bits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hpctrain.comm import Collective, World
from hpctrain.errors import UsageError
from hpctrain.reduce import AllReduceUpdater, factory as make_module
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.contract.bucket_plan import FLAG_GAP, Bucket
from hpctrain.reduce.contract.bucket_reducer import Finishing, Numbers
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.reduce.shared_memory import all_reduce_reducer as engine_module, summation as add_module
from hpctrain.reduce.shared_memory.all_reduce_reducer import AllReduceReducer
from hpctrain.reduce.shared_memory.summation import add_in_numpy
from hpctrain.topology import Topology
from tests.states import wait_for
from tests.unit.reduce.data_parallel.updater_cases import closeness, on_threads, plain_torch, train


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
        assert isinstance(made, AllReduceReducer)
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

    def __init__(self, reducer: AllReduceReducer) -> None:
        self._reducer = reducer
        self._buffers: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}
        self.reported: list[tuple[int, int]] = []
        self.factors: list[float] = []

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        self._buffers = self._reducer.plan(buckets, device=device)
        return self._buffers

    def filled(self, number: int, num_elems: int) -> None:
        self.reported.append((number, num_elems))
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

    def begin_step(self, factor: float) -> float:
        self.factors.append(factor)
        return self._reducer.begin_step(factor)

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        return self._reducer.finish(numbers, comm=comm)

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
def test_what_is_reported_to_be_there_is_there_and_is_not_written_again(micro_batches: int) -> None:
    numels = [50_000] * 6
    whole = (0, 300_000 + FLAG_GAP + 6)
    orders_and_reported = [
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
        assert isinstance(made, AllReduceReducer)
        reducer, parameters = Impatient(made), large(numels)
        updater = AllReduceUpdater(
            torch.optim.SGD(parameters, lr=0.1), comm=world.duplicate(), reducer=reducer, overlap=False
        )
        for order, reported in orders_and_reported:
            for number in range(micro_batches if order else 0):
                assert reducer.reported == []
                last = number == micro_batches - 1
                updater.backward(squares(parameters, order), weight=1 / (2 * micro_batches), last=last)
            assert reducer.reported == (reported if len(order) == 6 else reported[:-1])
            updater.step()
            assert reducer.reported == reported
            reducer.reported.clear()
        updater.close()
        reducer.close()
        return [parameter.detach() for parameter in parameters]

    expected = large(numels)
    optimizer = torch.optim.SGD(expected, lr=0.1)
    for order, _ in orders_and_reported:
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
    wait_for(lambda: len(applied) == 2)  # the other thread may not have ended yet
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


@pytest.mark.parametrize("compiled", [True, False])
def test_a_note_is_printed_once_where_nothing_was_compiled(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_module, "COMPILED", object() if compiled else None)

    def case(world: World) -> list[str]:
        notes: list[str] = []
        maker = ReducerMaker(world, topology=Topology.from_node_names(["a", "a"]), note=notes.append)
        for _ in range(2):
            maker.make(Algorithm.HIERARCHICAL, wire="fp32").close()
        return notes

    for notes in on_threads(2, case):
        assert ["are computed by numpy" in note for note in notes] == [True] * (not compiled)
