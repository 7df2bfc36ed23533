"""Buckets in the order in which gradients become ready, and what a checkpoint holds of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.errors import UsageError
from hpctrain.reduce import AllReduceUpdater, LossScale
from hpctrain.reduce.contract.bucket_reducer import StateTensor
from tests.unit.reduce.data_parallel.updater_cases import Watched, on_threads, reducer_for


class Crossed(torch.nn.Module):
    """Parameters registered in another order than forward uses them; the last is seldom used."""

    ORDER = (2, 0, 3, 1)  # of use

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(5, 5, generator=generator)) for _ in range(5)
        )

    def forward(self, x: torch.Tensor, *, last: bool = False) -> torch.Tensor:
        for index in self.ORDER:
            x = torch.tanh(x @ self.weights[index])
        return (x @ self.weights[4]).sum() if last else x.sum()


READY = [1, 3, 0, 2]  # backward reaches first what forward used last
RECORDED = [*READY, 4]
GUESSED = [4, 3, 2, 1, 0]


def make(world: World, **options: Any) -> tuple[Crossed, AllReduceUpdater, Watched]:
    model = Crossed()
    reducer = Watched(reducer_for(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"bucket_bytes": 200, **options}
    return model, AllReduceUpdater(optimizer, comm=world, reducer=reducer, **options), reducer


def one_step(world: World, model: Crossed, updater: AllReduceUpdater, *, step: int = 0, **how: bool) -> None:
    generator = torch.Generator().manual_seed(10 * step + world.rank)
    updater.backward(model(torch.randn(3, 5, generator=generator), **how), weight=1 / world.num_ranks)
    updater.step()


def orders(reducer: Watched) -> list[list[int]]:
    return [[slot.parameter for bucket in plan for slot in bucket.slots] for plan in reducer.plans]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_from_the_second_step_on_buckets_are_in_the_order_of_readiness(num_ranks: int) -> None:
    def case(world: World) -> tuple[list[list[int]], list[int], Any]:
        model, updater, reducer = make(world)
        for step in range(4):
            one_step(world, model, updater, step=step)
        updater.close()
        return orders(reducer), reducer.reduced, updater.state()["order"]

    for planned, reduced, saved in on_threads(num_ranks, case):
        assert planned == [GUESSED, RECORDED]
        assert reduced == [0, 1, 2] * 4  # buckets of two, two and one
        assert saved == RECORDED


def test_all_ranks_take_the_order_of_rank_0() -> None:
    def case(world: World) -> list[list[int]]:
        model, updater, reducer = make(world)
        if world.rank == 1:
            model.ORDER = (
                0,
                1,
                2,
                3,
            )  # its gradients come in another order, and are reduced in the agreed one
        for step in range(2):
            one_step(world, model, updater, step=step)
        updater.close()
        return orders(reducer)

    assert on_threads(2, case) == [[GUESSED, RECORDED]] * 2


def test_the_order_is_recorded_in_the_first_step_in_which_rank_0_has_samples() -> None:
    def case(world: World) -> list[int]:
        model, updater, reducer = make(world)
        counts = []
        for step in range(3):
            if world.rank == 1 or step == 1:
                one_step(world, model, updater, step=step)
            else:
                updater.step()
            counts.append(len(reducer.plans))
        assert orders(reducer)[-1] == RECORDED
        updater.close()
        return counts

    assert on_threads(2, case) == [[1, 2, 2]] * 2


def test_an_order_that_was_guessed_right_is_not_planned_again() -> None:
    def case(world: World) -> int:
        weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        reducer = Watched(reducer_for(world))
        updater = AllReduceUpdater(
            torch.optim.SGD(weights, lr=0.1), comm=world, reducer=reducer, bucket_bytes=8
        )
        x = torch.ones(3)
        for weight in weights:
            x = torch.tanh(x * weight)
        updater.backward(x.sum(), weight=0.5)
        updater.step()
        assert updater.state()["order"] == [2, 1, 0]
        updater.close()
        return len(reducer.plans)

    assert on_threads(2, case) == [1, 1]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stop_after", [1, 2])
def test_resumed_buckets_are_those_of_the_run_that_never_stopped(num_ranks: int, stop_after: int) -> None:
    steps = 4

    def case(world: World) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[int]]]:
        whole, updater, _ = make(world)
        for step in range(steps):
            one_step(world, whole, updater, step=step, last=step == 2)
        updater.close()
        first, updater, _ = make(world)
        for step in range(stop_after):
            one_step(world, first, updater, step=step, last=step == 2)
        saved = json.dumps(updater.state())
        updater.close()
        second, updater, reducer = make(world)
        second.load_state_dict(first.state_dict())
        updater.load_state(json.loads(saved))
        for step in range(stop_after, steps):
            one_step(world, second, updater, step=step, last=step == 2)
        updater.close()
        return list(whole.parameters()), list(second.parameters()), orders(reducer)

    for whole, resumed, planned in on_threads(num_ranks, case):
        assert all(map(torch.equal, whole, resumed))
        # In step 2 the last weight becomes ready first: a run that recorded anew would have it in front.
        assert planned == [GUESSED, RECORDED]


def test_a_checkpoint_without_an_order_begins_with_the_guess_and_records() -> None:
    def case(world: World) -> list[list[int]]:
        model, updater, reducer = make(world)
        one_step(world, model, updater)
        state = updater.state()
        del state["order"]  # as older versions wrote it
        updater.load_state(state)
        one_step(world, model, updater)
        updater.close()
        return orders(reducer)

    assert on_threads(2, case) == [[GUESSED, RECORDED, GUESSED, RECORDED]] * 2


def test_one_rank_keeps_its_plan_and_an_order_that_was_saved_by_several() -> None:
    def case(world: World) -> tuple[Any, Any, list[list[int]]]:
        model, updater, reducer = make(world)
        one_step(world, model, updater)
        before = updater.state()["order"]
        updater.load_state({**updater.state(), "order": RECORDED})
        one_step(world, model, updater)
        updater.close()
        return before, updater.state()["order"], orders(reducer)

    assert on_threads(1, case) == [(None, RECORDED, [GUESSED, RECORDED])]


def test_state_loaded_in_the_middle_of_a_step_is_refused() -> None:
    def case(world: World) -> None:
        model, updater, _ = make(world)
        updater.backward(model(torch.ones(1, 5)), weight=1.0)
        try:
            updater.load_state(updater.state())
        finally:
            updater.close()

    with pytest.raises(UsageError, match="between backward and step"):
        on_threads(1, case)


def test_the_reducer_learns_how_each_step_ended_and_gets_its_tensors_back() -> None:
    def case(world: World) -> tuple[Any, Any, Any]:
        model, updater, reducer = make(world)
        updater.backward(model(torch.ones(1, 5)), weight=1.0)
        updater.step()
        updater.backward(model(torch.ones(1, 5)) * float("nan"), weight=1.0)
        updater.step()
        row = StateTensor(
            name="residual",
            tensor=torch.ones(1, 2),
            global_shape=(world.num_ranks, 2),
            offset=(world.rank, 0),
        )
        reducer.state = lambda: [row]  # type: ignore[attr-defined]
        mine = updater.state_tensors() == [row]
        updater.load_state(updater.state(), {"residual": torch.ones(2, 2)})
        updater.load_state(updater.state())
        updater.close()
        return reducer.settled, mine, [sorted(tensors) for tensors in reducer.loaded]

    assert on_threads(2, case) == [([(True, 1.0), (False, 1.0)], True, [["residual"], []])] * 2


def test_an_overflow_rescales_what_was_fed_back() -> None:
    def case(world: World) -> Any:
        model, updater, reducer = make(world, loss_scale=LossScale(value=8.0, dynamic=True, growth_steps=1))
        updater.backward(model(torch.ones(1, 5)), weight=1.0)
        updater.step()
        updater.backward(model(torch.ones(1, 5)) * float("inf"), weight=1.0)
        updater.step()
        updater.close()
        return reducer.settled

    assert on_threads(2, case) == [[(True, 2.0), (False, 0.5)]] * 2


@pytest.mark.parametrize(("dynamic", "settled"), [(True, []), (False, [(False, 0.125)])])
def test_what_was_fed_back_under_another_loss_scale_is_rescaled(dynamic: bool, settled: list[Any]) -> None:
    def case(world: World) -> Any:
        _, updater, _ = make(world, loss_scale=LossScale(value=8.0, dynamic=True))
        saved = updater.state()
        updater.close()
        _, updater, reducer = make(world, loss_scale=LossScale(value=1.0, dynamic=dynamic))
        updater.load_state(saved)
        updater.close()
        return reducer.settled

    assert on_threads(1, case) == [settled]
